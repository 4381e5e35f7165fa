"""`python -m dask_mohpo` is `dask-mohpo`."""

from dask_mohpo.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
