//! How a Python program gets its local rank: read from its source, if that can be found.

use drumline_launch::{LocalRankArg, Program};

use super::args::RunArgs;

impl RunArgs {
    /// The spelling of `--local-rank` that the program's source declares.
    pub(crate) fn declared_local_rank(&self) -> Option<LocalRankArg> {
        LocalRankArg::declared_in(&self.source()?)
    }

    /// A remark about a program that declares the argument, which `drumline run` and torchrun do not pass, and does not read the
    /// variable.
    pub(crate) fn local_rank_remark(&self) -> Option<String> {
        let source = self.source()?;
        let given = |word: &std::ffi::OsString| {
            let word = word.to_string_lossy();
            word.starts_with("--local_rank") || word.starts_with("--local-rank")
        };
        if source.contains("LOCAL_RANK") || self.command.iter().skip(1).any(given) {
            return None;
        }
        let flag = match LocalRankArg::declared_in(&source)? {
            LocalRankArg::Dash => "--local-rank",
            LocalRankArg::Underscore => "--local_rank",
        };
        let name = self.python_program()?.sources().into_iter().find(|path| path.exists())?;
        Some(format!(
            "{} declares {flag}, which run does not pass, like torchrun; drumline launch does",
            name.display()
        ))
    }

    fn source(&self) -> Option<String> {
        self.python_program()?.sources().iter().find_map(|path| std::fs::read_to_string(path).ok())
    }

    /// The program, if Python runs it. Its interpreter is left open.
    pub(super) fn python_program(&self) -> Option<Program> {
        let interpreter = "".into();
        match self.command.split_first()? {
            (name, _) if self.module => Some(Program::PythonModule { interpreter, module: name.clone() }),
            _ if self.no_python => None,
            (name, _) if Program::is_python_script(name) => {
                Some(Program::Python { interpreter, script: name.clone() })
            }
            (name, words) => Program::of_python_command(name, words).map(|(program, _)| program),
        }
    }
}
