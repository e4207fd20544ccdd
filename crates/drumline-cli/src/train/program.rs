//! Where `drumline-train` is: in the folder of this program, as for git and cargo, or in PATH.

use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

const NAME: &str = "drumline-train";

/// `drumline-train` was not found. It is a separate program because it needs libtorch, which nothing else does.
#[derive(Debug, thiserror::Error)]
#[error(
    "{NAME} was found neither in {} nor in PATH; try cargo build --release -p drumline-zoo, \
     or put it in the folder of drumline", beside.display()
)]
pub(crate) struct Missing {
    beside: PathBuf,
}

pub(crate) fn trainer() -> Result<PathBuf, Missing> {
    let beside =
        std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.to_owned())).unwrap_or_default();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(beside.clone()).chain(std::env::split_paths(&path));
    let mut places = folders.filter(|folder| folder.is_absolute()).map(|folder| folder.join(NAME));
    places.find(|place| is_program(place)).ok_or(Missing { beside })
}

fn is_program(path: &Path) -> bool {
    path.is_file() && access(path, Access::EXEC_OK).is_ok()
}
