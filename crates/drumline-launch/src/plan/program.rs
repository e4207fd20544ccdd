//! What the workers run, and its command line.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// What the workers run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Program {
    /// A script, run by an interpreter.
    Python {
        /// The interpreter.
        interpreter: OsString,
        /// The script.
        script: OsString,
    },
    /// A module, as `python -m` does.
    PythonModule {
        /// The interpreter.
        interpreter: OsString,
        /// The module's name.
        module: OsString,
    },
    /// Anything that can be executed.
    Executable(OsString),
    /// A script, run through `runpy.run_path`.
    RunPath {
        /// The interpreter.
        interpreter: OsString,
        /// The script.
        script: OsString,
    },
}

/// Python code that runs a script with `runpy`, with its own arguments as `sys.argv`.
const RUN_PATH: &str = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')";

impl Program {
    /// The program to execute and the arguments that come before the user's own.
    pub fn command(&self) -> (OsString, Vec<OsString>) {
        let python = |interpreter: &OsStr, args: &[&OsStr]| {
            let unbuffered = [OsStr::new("-u")];
            let args = unbuffered.iter().chain(args).map(|arg| (*arg).to_owned()).collect();
            (interpreter.to_owned(), args)
        };
        match self {
            Self::Python { interpreter, script } => python(interpreter, &[script]),
            Self::PythonModule { interpreter, module } => python(interpreter, &["-m".as_ref(), module]),
            Self::RunPath { interpreter, script } => {
                python(interpreter, &["-c".as_ref(), RUN_PATH.as_ref(), script])
            }
            Self::Executable(program) => (program.clone(), Vec::new()),
        }
    }

    /// Whether a file with this name is run by the Python interpreter.
    pub fn is_python_script(name: &OsStr) -> bool {
        Path::new(name).extension().is_some_and(|extension| extension == "py")
    }
}

/// How the local rank is spelled as an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LocalRankArg {
    /// `--local-rank=N`, as PyTorch 2 does.
    Dash,
    /// `--local_rank=N`, as PyTorch 1 and DeepSpeed do.
    Underscore,
}

impl LocalRankArg {
    /// The spelling that a Python program declares in its argument parser; `None` if it declares neither or both.
    ///
    /// ```
    /// use drumline_launch::LocalRankArg;
    ///
    /// let script = "parser.add_argument('--local_rank', type=int)";
    /// assert_eq!(LocalRankArg::declared_in(script), Some(LocalRankArg::Underscore));
    /// assert_eq!(LocalRankArg::declared_in("rank = os.environ['LOCAL_RANK']"), None);
    /// ```
    pub fn declared_in(script: &str) -> Option<Self> {
        let code = || script.lines().filter(|line| !line.trim_start().starts_with('#'));
        let declares = |flag: &str| {
            let quoted = [format!("'{flag}'"), format!("\"{flag}\"")];
            code().any(|line| quoted.iter().any(|quoted| line.contains(quoted)))
        };
        match (declares("--local-rank"), declares("--local_rank")) {
            (true, false) => Some(Self::Dash),
            (false, true) => Some(Self::Underscore),
            _ => None,
        }
    }

    /// The argument for one worker.
    pub fn of(self, local_rank: usize) -> OsString {
        match self {
            Self::Dash => format!("--local-rank={local_rank}").into(),
            Self::Underscore => format!("--local_rank={local_rank}").into(),
        }
    }
}

impl Program {
    /// The files that may contain the source of a Python program, relative to the folder in which it is started.
    pub fn sources(&self) -> Vec<PathBuf> {
        match self {
            Self::Python { script, .. } | Self::RunPath { script, .. } => vec![script.into()],
            Self::PythonModule { module, .. } => {
                let path = module.to_string_lossy().replace('.', "/");
                [format!("{path}.py"), format!("{path}/__main__.py")].map(PathBuf::from).into()
            }
            Self::Executable(_) => Vec::new(),
        }
    }

    /// The Python script to run, if it does not exist: otherwise every rank would report that.
    pub fn missing_script(&self) -> Option<&OsStr> {
        match self {
            Self::Python { script, .. } | Self::RunPath { script, .. } => {
                Some(script.as_os_str()).filter(|script| !Path::new(script).exists())
            }
            Self::PythonModule { .. } | Self::Executable(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(program: &Program) -> Vec<String> {
        let (command, args) = program.command();
        [vec![command], args].concat().into_iter().map(|word| word.into_string().unwrap()).collect()
    }

    #[test]
    fn python_is_unbuffered_and_the_rest_is_executed() {
        let interpreter = OsString::from("py");
        let script = Program::Python { interpreter: interpreter.clone(), script: "a.py".into() };
        assert_eq!(words(&script), ["py", "-u", "a.py"]);
        let module = Program::PythonModule { interpreter: interpreter.clone(), module: "a.b".into() };
        assert_eq!(words(&module), ["py", "-u", "-m", "a.b"]);
        assert_eq!(words(&Program::Executable("./a".into())), ["./a"]);
        let path = Program::RunPath { interpreter, script: "/a.py".into() };
        assert_eq!(words(&path), ["py", "-u", "-c", RUN_PATH, "/a.py"]);
    }

    #[test]
    fn the_spelling_follows_the_programs_own_parser() {
        let (dash, underscore) = (Some(LocalRankArg::Dash), Some(LocalRankArg::Underscore));
        for (script, spelling) in [
            ("parser.add_argument('--local_rank', type=int)", underscore),
            ("p.add_argument(\n    \"--local_rank\",\n    type=int)", underscore),
            ("p.add_argument('--local-rank', type=int)", dash),
            ("p.add_argument('--local-rank', '--local_rank', type=int)", None),
            ("# p.add_argument('--local_rank')\np.add_argument('--local-rank')", dash),
            ("'''usage: train.py --local_rank N'''", None),
            ("args.local_rank = int(os.environ['LOCAL_RANK'])", None),
            ("", None),
        ] {
            assert_eq!(LocalRankArg::declared_in(script), spelling, "{script}");
        }
    }

    #[test]
    fn sources_are_where_python_looks_for_them() {
        let interpreter = OsString::from("py");
        let script = Program::Python { interpreter: interpreter.clone(), script: "x/a.py".into() };
        assert_eq!(script.sources(), [PathBuf::from("x/a.py")]);
        let module = Program::PythonModule { interpreter, module: "src.bin.train".into() };
        assert_eq!(module.sources(), ["src/bin/train.py", "src/bin/train/__main__.py"].map(PathBuf::from));
        assert!(Program::Executable("./a.py".into()).sources().is_empty());
    }

    #[test]
    fn scripts_are_recognized_by_their_extension() {
        for (name, python) in
            [("a.py", true), ("/x.y/a.py", true), ("py", false), ("a.pyx", false), ("a", false)]
        {
            assert_eq!(Program::is_python_script(name.as_ref()), python, "{name}");
        }
    }
}
