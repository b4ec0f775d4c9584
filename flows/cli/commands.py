"""The commands beside the flows. Imports nothing."""

# Name → where its function is, imported only for itself: a look at a run waits for nothing else.
COMMANDS = {
    "ls": ("look.ls", "lists the runs: epoch, loss, tau, who is at work"),
    "status": ("look.status", "says how one run stands: stages, time left, checkpoint, warnings"),
    "logs": ("look.logs", "shows what the stages of a run printed; -f goes on"),
    "compare": ("compare.main", "sets two runs side by side, as tables and as a page with curves"),
    "track": ("look.track", "sends a run's curves to Weights & Biases, MLflow or trackio"),
    "resume": ("run_here.resume", "goes on with a run as it was started; nothing is typed again"),
    "init": ("own_file.init", "writes a file of all fields for a target and rows of your own"),
    "schema": ("own_file.schema", "prints the JSON schema of such a file, for editors"),
    "completion": ("completion.main", "prints a completion script for bash, zsh or fish"),
    "serve": ("serve.main", "serves a run's drafter in llama.cpp's server"),
    "clean": ("clean.main", "lists what no run needs, and deletes it once that is agreed"),
}
