"""`dflash-train completion bash|zsh|fish`: a script for the shell that knows commands, flows, options, fields and runs.

echo 'source <(dflash-train completion bash)' >> ~/.bashrc
"""

import argparse
import shlex

from flows.cli.commands import COMMANDS
from flows.cli.fields import FLOWS, all_fields
from flows.cli.presets import read_deployments
from flows.runs.parameters import repository, resolve_home

_BASH = """\
_dflash_train() {{
  local now=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} runs=${{DFLASH_HOME:-{home}}}/runs
  COMPREPLY=()
  case $before in
    -f|--file|--html) compopt -o default; return;;
    --set) compopt -o nospace; COMPREPLY=($(compgen -W "{fields}" -- "$now")); return;;
  esac
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W "{names}" -- "$now"))
  elif [[ $now == -* ]]; then
    COMPREPLY=($(compgen -W "{options}" -- "$now"))
  else
    case ${{COMP_WORDS[1]}} in
      {of_runs}) COMPREPLY=($(compgen -W "$(ls "$runs" 2>/dev/null)" -- "$now"));;
    esac
  fi
}}
complete -F _dflash_train dflash-train
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
_FISH = """\
complete -c dflash-train -f
complete -c dflash-train -n __fish_use_subcommand -a "{names}"
complete -c dflash-train -n "__fish_seen_subcommand_from {runs}" -a "(ls (set -q DFLASH_HOME; and echo $DFLASH_HOME; \
or echo {home})/runs 2>/dev/null)"
complete -c dflash-train -s f -l file -r -F
complete -c dflash-train -l set -r -a "{fields}"
complete -c dflash-train -l show -l dry-run -l override -l help
"""
_OF_RUNS = ("status", "logs", "resume", "compare", "track", "serve")
_OPTIONS = ("--file", "--set", "--show", "--dry-run", "--override", "--home", "--help", "--follow", "--html")


def main(arguments: list[str], program: str) -> int:
    parser = argparse.ArgumentParser(
        prog=f"{program} completion",
        description="Prints a completion script: source <(dflash-train completion bash), in ~/.bashrc.",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell = parser.parse_args(arguments).shell
    names = sorted({*COMMANDS, *FLOWS, *read_deployments(repository())})
    fields = [f"{path}=" for path in all_fields()]
    home = shlex.quote(str(resolve_home(None)))
    if shell == "fish":
        text = _FISH.format(names=" ".join(names), runs=" ".join(_OF_RUNS), fields=" ".join(fields), home=home)
    else:
        text = _BASH.format(
            names=" ".join(names),
            fields=" ".join(fields),
            options=" ".join(_OPTIONS),
            of_runs="|".join(_OF_RUNS),
            home=home,
        )
    print((_ZSH if shell == "zsh" else "") + text, end="")
    return 0
