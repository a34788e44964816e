"""The kit's commands where nothing was installed, such as from a checkout: `python -m kvpact_testkit demo`."""

from kvpact.cli.app import new_app
from kvpact_testkit.cli.compare import compare
from kvpact_testkit.cli.conformance import conformance
from kvpact_testkit.cli.demo import demo

app = new_app("The test kit of kvpact.")
app.command()(conformance)
app.command()(demo)
app.command()(compare)

if __name__ == "__main__":
    app(prog_name="python -m kvpact_testkit")
