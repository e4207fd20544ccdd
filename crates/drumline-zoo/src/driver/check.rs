//! `drumline-train --check COMMAND …`: checks a configuration and its files as one process, before ranks are started.
//!
//! `drumline train` and similar commands run this check first, so that an error is reported once. Ranks check again,
//! because other hosts may have other files.

use super::host::{check_folders, check_writable};
use super::test;
use super::{Given, checked, load};
use crate::task::{Folders, Purpose, Task};

/// Returns an error if a training run could not start.
pub(crate) fn check_training<T: Task>(config: anyhow::Result<T::Config>) -> anyhow::Result<()> {
    let task = checked::<T>(config, Purpose::Train)?;
    task.check()?;
    let Folders { own, key, .. } = task.folders();
    check_writable(key, &own)?;
    check_folders(&task)
}

/// Returns an error if a test could not start, or if there is no model to test.
pub(crate) fn check_test<T: Task>(given: &Given<'_>) -> anyhow::Result<()> {
    let task = checked::<T>(load(given), Purpose::Test)?;
    test::check_model(&task, given)?;
    task.check()
}
