//! Whether a process that is visible here has ended.

/// Whether the process is gone or a zombie. Only used for processes of our own [space](crate::ProcessSpace), and when
/// their connection has ended.
pub(super) fn has_ended(pid: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => state_of(&stat).is_none_or(|state| matches!(state, 'Z' | 'X' | 'x')),
        Err(_) => true,
    }
}

/// The state letter after the name, which is in parentheses and may contain anything.
fn state_of(stat: &str) -> Option<char> {
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zombie_has_ended_and_this_process_has_not() {
        assert!(!has_ended(std::process::id()));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        while !has_ended(pid) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.wait().unwrap();
        assert!(has_ended(pid));
        assert_eq!(state_of("7 (a) b) S 1 2"), Some('S'));
    }
}
