//! A test that cannot run here reports it, or fails if everything is required.

use std::time::Duration;

use rank_test::{Exit, REQUIRE_ALL, ranks_test, require_tool};

ranks_test!(
    a_missing_tool_is_reported_or_fatal,
    1,
    {
        assert!(require_tool("sh"));
        assert!(!require_tool("no-such-tool-anywhere"));
    },
    |ranks| {
        let soon = Duration::from_secs(10);
        let skipped = ranks.clone().env([(REQUIRE_ALL, "0")]).pass()?;
        let stderr = skipped.ranks[0].stderr_text().into_owned();
        let line = "SKIPPED: it::skipping::a_missing_tool_is_reported_or_fatal: `no-such-tool-anywhere` is not installed\n";
        assert_eq!(stderr, line);
        let required = ranks.env([(REQUIRE_ALL, "1")]).start()?.wait_all(soon)?;
        assert_eq!(required.ranks[0].exit, Exit::Code(101));
    }
);
