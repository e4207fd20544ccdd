//! `ranks_test!`: a test that runs as N real processes.

use anyhow::Result;

use crate::{Ranks, in_rank};

/// Defines a `#[test]` whose body runs in N processes: the test binary, executed again N times.
///
/// The body may use `?` (with `anyhow`). The test fails, with the output of each rank that failed, if a rank returns an
/// error or panics, or after 60 s. `timeout = …` and `env = […]` are methods of [`Ranks`], and may come before the
/// body.
///
/// ```
/// # use rank_test::ranks_test;
/// use std::time::Duration;
///
/// ranks_test!(knows_its_rank, 2, {
///     let rank: usize = std::env::var("RANK")?.parse()?;
///     assert!(rank < 2);
/// });
///
/// ranks_test!(over_tcp, 3, timeout = Duration::from_secs(20), env = [("DRUMLINE_TRANSPORT", "tcp")], {
///     assert_eq!(std::env::var("DRUMLINE_TRANSPORT")?, "tcp");
/// });
/// ```
///
/// With a second block, the test itself decides how the ranks are started and what is done to them:
///
/// ```
/// # use rank_test::ranks_test;
/// use rank_test::Exit;
/// use std::time::Duration;
///
/// ranks_test!(dies_of_sigkill, 2, {
///     println!("ready");
///     std::thread::sleep(Duration::from_secs(30));
/// }, |ranks| {
///     let running = ranks.start()?;
///     for rank in 0..2 {
///         running.wait_for_line(rank, "ready", Duration::from_secs(10))?;
///         running.kill(rank)?;
///     }
///     let report = running.wait_all(Duration::from_secs(5))?;
///     assert_eq!(report.ranks[1].exit, Exit::Signal(9));
/// });
/// ```
#[macro_export]
macro_rules! ranks_test {
    ($(#[$meta:meta])* $name:ident, $nproc:expr, $($option:ident = $value:expr,)* $body:block $(,)?) => {
        $crate::ranks_test!($(#[$meta])* $name, $nproc, $($option = $value,)* $body, |ranks| { ranks.pass()?; });
    };
    ($(#[$meta:meta])* $name:ident, $nproc:expr, $($option:ident = $value:expr,)* $body:block,
     |$ranks:ident| $control:block $(,)?) => {
        #[test]
        $(#[$meta])*
        fn $name() {
            let ranks = $crate::Ranks::of_test(module_path!(), stringify!($name), $nproc)$(.$option($value))*;
            #[allow(unreachable_code)]
            let body = || -> $crate::anyhow::Result<()> {
                let () = $body;
                Ok(())
            };
            #[allow(unreachable_code)]
            let control = |$ranks: $crate::Ranks| -> $crate::anyhow::Result<()> {
                let () = $control;
                Ok(())
            };
            $crate::run_test(ranks, body, control);
        }
    };
}

/// The implementation of a [`ranks_test!`] function: it runs the body in a rank, and `control` in the test's own
/// process.
#[track_caller]
pub fn run_test(ranks: Ranks, body: impl FnOnce() -> Result<()>, control: impl FnOnce(Ranks) -> Result<()>) {
    if in_rank::is_rank_of(ranks.name()) {
        in_rank::run(body);
    }
    if let Err(error) = control(ranks) {
        panic!("{error:?}");
    }
}

#[cfg(test)]
mod tests {
    mod nested {
        crate::ranks_test!(unit_tests_in_nested_modules_find_themselves, 2, {
            assert_eq!(std::env::var("WORLD_SIZE")?, "2");
        });
    }
}
