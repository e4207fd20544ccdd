//! Advice for a worker's program that could not be started. It inspects the program's file, so it is computed once,
//! when the error is created.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// The longest first line of a script that the kernel reads.
const FIRST_LINE: u64 = 256;

/// The advice that follows "; " in the error of a `program` that could not be started.
pub(crate) fn spawn_advice(program: &OsStr, error: &io::Error) -> String {
    let path = Path::new(program);
    match Errno::from_io_error(error) {
        Some(Errno::NOENT) => absent(path),
        Some(Errno::ACCESS) => forbidden(path),
        Some(Errno::NOEXEC) => {
            "it is not a program for this machine; try building it here, or a first line such \
                                as #!/bin/sh"
                .to_string()
        }
        Some(Errno::MFILE) => {
            "the launcher may not open more files; try `ulimit -n 65536` before it".to_string()
        }
        Some(Errno::NFILE) => {
            "no process of this machine may open more files; try a higher sysctl fs.file-max".to_string()
        }
        Some(Errno::AGAIN) => {
            "no more processes are allowed; try fewer ranks, a higher `ulimit -u`, or a higher \
                               limit of processes of the container (pids.max)"
                .to_string()
        }
        Some(Errno::NOMEM) => {
            "there is not enough memory; try fewer ranks, or more memory for the job or the \
                               container"
                .to_string()
        }
        Some(Errno::TOOBIG) => "its arguments and environment are too long; try passing a file".to_string(),
        Some(Errno::INVAL) => {
            "the cores that it should be bound to may be gone; try --numa-binding none".to_string()
        }
        _ => "try starting it without the launcher".to_string(),
    }
}

fn absent(path: &Path) -> String {
    if path.components().count() > 1 || path.is_absolute() {
        return match (path.is_file(), interpreter(path)) {
            (true, Some(interpreter)) => {
                let shown = interpreter.display();
                format!(
                    "the file exists, but not `{shown}`, which its first line names; try correcting that line"
                )
            }
            (true, None) => {
                "the file exists, but not the loader it was built for; try building it here".to_string()
            }
            (false, _) => "there is no such file; try its full path".to_string(),
        };
    }
    let name = path.to_string_lossy();
    let module = format!("{}.py", name.replace('.', "/"));
    if path.is_file() {
        format!("it is not in PATH but in this folder; try ./{name}")
    } else if is_module_name(&name) && Path::new(&module).is_file() {
        format!("it is the Python module of {module}; try -m before {name}")
    } else if is_module_name(&name) {
        format!("it is not in PATH; try its full path, or -m before {name} if it is a Python module")
    } else {
        "it is not in PATH; try its full path".to_string()
    }
}

/// Whether it has the form of a Python module in a package.
fn is_module_name(name: &str) -> bool {
    let is_word = |word: &str| {
        let mut letters = word.chars();
        letters.next().is_some_and(|c| c.is_alphabetic() || c == '_')
            && letters.all(|c| c.is_alphanumeric() || c == '_')
    };
    name.contains('.') && name.split('.').all(is_word)
}

fn forbidden(path: &Path) -> String {
    let executable =
        |path: &Path| fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o111 != 0);
    let shown = path.display();
    match interpreter(path) {
        _ if path.is_dir() => "it is a folder; try the program in it".to_string(),
        _ if path.is_file() && !executable(path) => {
            let python = path.extension().is_some_and(|extension| extension == "py");
            let or = if python { ", or no --no-python" } else { "" };
            format!("the file may not be executed; try chmod +x {shown}{or}")
        }
        Some(interpreter) if !executable(&interpreter) => {
            let named = interpreter.display();
            format!("`{named}`, which its first line names, may not be executed; try chmod +x {named}")
        }
        _ => "its folder, or the file system it is on (noexec), forbids it; try a copy elsewhere".to_string(),
    }
}

/// The program that the first line of a script names.
fn interpreter(path: &Path) -> Option<PathBuf> {
    let mut line = Vec::new();
    BufReader::new(File::open(path).ok()?.take(FIRST_LINE)).read_until(b'\n', &mut line).ok()?;
    let line = String::from_utf8_lossy(&line);
    line.strip_prefix("#!")?.split_whitespace().next().map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advice(program: impl AsRef<OsStr>, errno: Errno) -> String {
        spawn_advice(program.as_ref(), &io::Error::from(errno))
    }

    #[test]
    fn errors_about_limits_say_what_raises_them() {
        for (errno, expected) in [
            (Errno::MFILE, "ulimit -n"),
            (Errno::NFILE, "fs.file-max"),
            (Errno::AGAIN, "ulimit -u"),
            (Errno::NOMEM, "memory"),
            (Errno::INVAL, "--numa-binding none"),
            (Errno::NOEXEC, "#!/bin/sh"),
            (Errno::IO, "without the launcher"),
        ] {
            let advice = advice("sh", errno);
            assert!(advice.contains(expected) && advice.contains("try "), "{errno:?}: {advice}");
        }
    }

    /// Our advice for the error that the system returns for a file.
    fn real(path: &Path) -> String {
        spawn_advice(path.as_os_str(), &std::process::Command::new(path).spawn().unwrap_err())
    }

    fn file(dir: &Path, name: &str, text: &str, mode: u32) -> PathBuf {
        let path = dir.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn the_advice_depends_on_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        assert_eq!(real(&dir.join("nope")), "there is no such file; try its full path");
        assert_eq!(real(Path::new("no-such-program")), "it is not in PATH; try its full path");
        let module = real(Path::new("no.such.module"));
        assert!(
            module.ends_with("try its full path, or -m before no.such.module if it is a Python module"),
            "{module}"
        );
        let here = real(Path::new("src.spawn_advice"));
        assert!(!here.contains("it is the Python module"), "control: {here}");
        assert!(!is_module_name("7z.exe") && !is_module_name("train") && !is_module_name("a..b"));
        let lost = real(&file(dir, "lost", "#!/no/such/python -u\n", 0o755));
        assert!(lost.contains("not `/no/such/python`, which its first line names"), "{lost}");
        let plain = file(dir, "plain", "#!/bin/sh\n", 0o644);
        assert_eq!(real(&plain), format!("the file may not be executed; try chmod +x {}", plain.display()));
        let script = real(&file(dir, "a.py", "pass\n", 0o644));
        assert!(script.ends_with(", or no --no-python"), "{script}");
        let through = real(&file(dir, "through", &format!("#!{}\n", plain.display()), 0o755));
        assert!(through.contains("which its first line names, may not be executed"), "{through}");
        assert_eq!(real(dir), "it is a folder; try the program in it");
        let binary = advice(file(dir, "binary", "\x7fELF", 0o755), Errno::NOENT);
        assert!(binary.contains("the loader it was built for"), "{binary}");
    }
}
