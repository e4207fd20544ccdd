//! What the workers run, and its command line.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::spawn_advice::spawn_advice;

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
    /// Python as the user typed it, such as `python3 -u train.py`.
    PythonCommand {
        /// The interpreter.
        interpreter: OsString,
        /// Its own arguments, up to the script, or to `-m MODULE` or `-c CODE`.
        words: Vec<OsString>,
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
            Self::PythonCommand { interpreter, words } => (interpreter.clone(), words.clone()),
            Self::Executable(program) => (program.clone(), Vec::new()),
        }
    }

    /// The program of a command that names a Python interpreter, and the program's arguments; `None` for any other
    /// command.
    ///
    /// ```
    /// use drumline_launch::Program;
    ///
    /// let words = ["-u", "train.py", "--lr", "0.1"].map(Into::into);
    /// let (program, args) = Program::of_python_command("python3".as_ref(), &words).unwrap();
    /// assert_eq!(program.command(), ("python3".into(), vec!["-u".into(), "train.py".into()]));
    /// assert_eq!(args, ["--lr", "0.1"]);
    /// ```
    pub fn of_python_command<'a>(name: &OsStr, words: &'a [OsString]) -> Option<(Self, &'a [OsString])> {
        let file = Path::new(name).file_name()?.to_str()?;
        let version = file.strip_prefix("python").or_else(|| file.strip_prefix("pypy"))?;
        if !version.chars().all(|letter| letter.is_ascii_digit() || letter == '.') {
            return None;
        }
        let (own, args) = words.split_at(python_words(words)?);
        Some((Self::PythonCommand { interpreter: name.to_owned(), words: own.to_vec() }, args))
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
            Self::PythonModule { module, .. } => module_sources(module),
            Self::PythonCommand { words, .. } => match &words[..] {
                [.., option, module] if is_option(option, 'm') => module_sources(module),
                _ => typed_script(words).map(PathBuf::from).into_iter().collect(),
            },
            Self::Executable(_) => Vec::new(),
        }
    }

    /// Why the executable that is to be run cannot be, if it does not exist. `path` is the launcher's `PATH`.
    pub fn missing_executable(&self, path: Option<&OsStr>) -> Option<String> {
        let (program, _) = self.command();
        let name = Path::new(&program);
        let is_found = if name.components().count() > 1 || name.is_absolute() {
            name.exists()
        } else {
            std::env::split_paths(path?).any(|folder| folder.join(name).is_file())
        };
        let advice = || spawn_advice(&program, &Errno::NOENT.into());
        (!is_found).then(|| format!("there is no program `{}`: {}", program.display(), advice()))
    }

    /// The Python script to run, if it does not exist: otherwise every rank would report that.
    pub fn missing_script(&self) -> Option<&OsStr> {
        match self {
            Self::Python { script, .. } | Self::RunPath { script, .. } => {
                Some(script.as_os_str()).filter(|script| !Path::new(script).exists())
            }
            Self::PythonCommand { words, .. } => {
                typed_script(words).filter(|script| !Path::new(script).exists())
            }
            Self::PythonModule { .. } | Self::Executable(_) => None,
        }
    }
}

/// Where Python looks for a module, relative to the folder in which it is started.
fn module_sources(module: &OsStr) -> Vec<PathBuf> {
    let path = module.to_string_lossy().replace('.', "/");
    [format!("{path}.py"), format!("{path}/__main__.py")].map(PathBuf::from).into()
}

/// Whether a word of Python's command line is this option, whose value is the next word.
fn is_option(word: &OsStr, letter: char) -> bool {
    let word = word.to_string_lossy();
    word.starts_with('-') && !word.starts_with("--") && word.ends_with(letter)
}

/// The script that a typed interpreter runs, unless that is a module or code.
fn typed_script(words: &[OsString]) -> Option<&OsStr> {
    match words {
        [.., option, _] if is_option(option, 'm') || is_option(option, 'c') => None,
        [.., script] if Program::is_python_script(script) => Some(script),
        _ => None,
    }
}

/// How many words after `python3` are for Python itself, including what it is to run; `None` if it is to run nothing,
/// or its input.
fn python_words(words: &[OsString]) -> Option<usize> {
    let mut index = 0;
    loop {
        let word = words.get(index)?.to_string_lossy();
        let Some(letters) = word.strip_prefix('-') else { return Some(index + 1) };
        if letters.is_empty() {
            return None;
        }
        // Of these letters, the first decides: the rest of the word is its value, or else the next word is.
        let option = letters.char_indices().find(|(_, letter)| "cmWX".contains(*letter));
        let has_value_next = |at: usize| at + 1 == letters.len();
        index += match option {
            _ if word == "--check-hash-based-pycs" => 2,
            _ if word.starts_with("--") => 1,
            Some((at, 'c' | 'm')) => {
                return Some(index + 1 + usize::from(has_value_next(at))).filter(|end| *end <= words.len());
            }
            Some((at, _)) => 1 + usize::from(has_value_next(at)),
            None => 1,
        };
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
    fn a_typed_interpreter_keeps_its_own_arguments() {
        for (command, own, args) in [
            ("python3 train.py --lr 1", "train.py", "--lr 1"),
            ("/usr/bin/python3.11 -u -W ignore train.py", "-u -W ignore train.py", ""),
            ("python -X importtime -Wignore -m pkg.train -m", "-X importtime -Wignore -m pkg.train", "-m"),
            ("python3 -um pkg x", "-um pkg", "x"),
            ("python3 -c pass a b", "-c pass", "a b"),
            ("python3 -cpass a", "-cpass", "a"),
            ("python3 --check-hash-based-pycs never ./run x", "--check-hash-based-pycs never ./run", "x"),
        ] {
            let words: Vec<OsString> = command.split(' ').skip(1).map(OsString::from).collect();
            let name = command.split(' ').next().unwrap();
            let (program, rest) = Program::of_python_command(name.as_ref(), &words).unwrap();
            let join = |words: &[OsString]| words.join(" ".as_ref()).into_string().unwrap();
            assert_eq!((join(&program.command().1).as_str(), join(rest).as_str()), (own, args), "{command}");
        }
        for other in
            ["python3", "python3 -V", "python3 -", "python3 -c", "pythonista a.py", "sh a.py", "./train x"]
        {
            let words: Vec<OsString> = other.split(' ').map(OsString::from).collect();
            assert_eq!(Program::of_python_command(&words[0], &words[1..]), None, "{other}");
        }
    }

    #[test]
    fn an_executable_is_looked_for_where_the_system_does() {
        let missing = |name: &str| Program::Executable(name.into()).missing_executable(Some("/bin".as_ref()));
        assert_eq!((missing("sh"), missing("/bin/sh")), (None, None));
        assert_eq!(
            missing("nope").unwrap(),
            "there is no program `nope`: it is not in PATH; try its full path"
        );
        assert!(missing("/bin/nope").unwrap().contains("there is no such file"));
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
