"""`python -m lilicorr <verb>`."""

from .cli import app

if __name__ == "__main__":
    app(prog_name="lilicorr")
