//! The per-user cache folder: its place, its lock, its free space, and the link to it.

use anyhow::{Context, bail};
use std::env;
use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long to wait for another run that is fetching.
const PATIENCE: Duration = Duration::from_secs(60 * 60);

/// `$XDG_CACHE_HOME/drumline` or `~/.cache/drumline`, created.
pub(crate) fn folder() -> anyhow::Result<PathBuf> {
    let xdg = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || env::home_dir().map(|home| home.join(".cache"));
    let base = xdg.or_else(home).context("no home folder is known; try setting XDG_CACHE_HOME")?;
    let folder = base.join("drumline");
    fs::create_dir_all(&folder)
        .with_context(|| format!("cannot create {}; try setting XDG_CACHE_HOME", folder.display()))?;
    Ok(folder)
}

/// Held while `folder` of the cache is fetched; freed with the returned file, also when this process is killed.
pub(crate) fn lock(cache: &Path, folder: &str) -> anyhow::Result<File> {
    let path = cache.join(format!("{folder}.lock"));
    let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    let end = Instant::now() + PATIENCE;
    let mut is_reported = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
            Err(TryLockError::WouldBlock) if Instant::now() > end => {
                bail!("another run has held {} for {PATIENCE:?}; try ending it", path.display());
            }
            Err(TryLockError::WouldBlock) if !is_reported => {
                eprintln!("another run is fetching {folder}; waiting for it ...");
                is_reported = true;
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(200)),
        }
    }
}

/// An error when the disk is too full for what will be fetched.
pub(crate) fn check_room(cache: &Path, needed: u64) -> anyhow::Result<()> {
    let disk =
        rustix::fs::statvfs(cache).with_context(|| format!("cannot ask the disk of {}", cache.display()))?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free < needed {
        let gigabytes = |bytes: u64| bytes as f64 / 1e9;
        bail!(
            "{} has {:.1} GB free, {:.1} GB are needed; try freeing some or setting XDG_CACHE_HOME to another disk",
            cache.display(),
            gigabytes(free),
            gigabytes(needed)
        );
    }
    Ok(())
}

/// Clear what an interrupted run had unpacked, and keep the packages it had fetched.
pub(crate) fn prepare_part(part: &Path) -> anyhow::Result<PathBuf> {
    for stale in ["site", "tmp"] {
        remove(&part.join(stale))?;
        fs::create_dir_all(part.join(stale))
            .with_context(|| format!("cannot write in {}", part.display()))?;
    }
    Ok(part.join("site"))
}

/// Give a complete folder its final name, in one step, and drop the rest.
pub(crate) fn keep(site: &Path, ready: &Path, part: &Path) -> anyhow::Result<()> {
    remove(ready)?;
    fs::rename(site, ready)
        .with_context(|| format!("cannot rename {} to {}", site.display(), ready.display()))?;
    remove(part)
}

/// Let `link` point at `folder`; an older link is replaced in one step.
pub(crate) fn link(link: &Path, folder: &Path) -> anyhow::Result<()> {
    if fs::read_link(link).is_ok_and(|target| target == folder) {
        return Ok(());
    }
    if fs::symlink_metadata(link).is_ok_and(|found| !found.is_symlink()) {
        bail!("{} is in the way and was not made by this command; try moving it", link.display());
    }
    let new = link.with_extension(format!("new-{}", std::process::id()));
    symlink(folder, &new).with_context(|| format!("cannot make the link {}", new.display()))?;
    fs::rename(&new, link).with_context(|| format!("cannot make the link {}", link.display()))?;
    eprintln!("{} -> {}", link.display(), folder.display());
    Ok(())
}

fn remove(path: &Path) -> anyhow::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let folder = env::temp_dir().join(format!("xtask-cache-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn a_link_is_replaced_but_a_folder_is_not() {
        let folder = scratch("link");
        let (first, second, at) = (folder.join("first"), folder.join("second"), folder.join(".libtorch"));
        link(&at, &first).unwrap();
        link(&at, &second).unwrap();
        assert_eq!(fs::read_link(&at).unwrap(), second);
        fs::remove_file(&at).unwrap();
        fs::create_dir(&at).unwrap();
        assert!(link(&at, &first).unwrap_err().to_string().contains("in the way"));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_part_keeps_its_packages_and_becomes_the_folder() {
        let folder = scratch("part");
        let (part, ready) = (folder.join("x.part"), folder.join("x"));
        fs::create_dir_all(part.join("wheels")).unwrap();
        fs::create_dir_all(part.join("site/stale")).unwrap();
        let site = prepare_part(&part).unwrap();
        assert!(part.join("wheels").exists() && !site.join("stale").exists());
        fs::write(site.join("fresh"), "").unwrap();
        keep(&site, &ready, &part).unwrap();
        assert!(ready.join("fresh").exists() && !part.exists());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_full_disk_is_reported() {
        let folder = env::temp_dir();
        check_room(&folder, 0).unwrap();
        assert!(check_room(&folder, u64::MAX).unwrap_err().to_string().contains("are needed"));
    }

    #[test]
    fn the_lock_has_one_holder() {
        let folder = scratch("lock");
        let held = lock(&folder, "x").unwrap();
        let other = File::open(folder.join("x.lock")).unwrap();
        assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)));
        drop(held);
        assert!(other.try_lock().is_ok());
        fs::remove_dir_all(&folder).unwrap();
    }
}
