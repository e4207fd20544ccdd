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
        let name = self.command[0].to_string_lossy();
        Some(format!("{name} declares {flag}, which run does not pass, like torchrun; drumline launch does"))
    }

    fn source(&self) -> Option<String> {
        let program = match self.command.first()? {
            name if self.module => Program::PythonModule { interpreter: "".into(), module: name.clone() },
            name if !self.no_python && Program::is_python_script(name) => {
                Program::Python { interpreter: "".into(), script: name.clone() }
            }
            _ => return None,
        };
        program.sources().iter().find_map(|path| std::fs::read_to_string(path).ok())
    }
}
