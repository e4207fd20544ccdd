//! `drumline on-host`: what a leading launcher starts on each host. It reads its order from stdin and becomes the agent.

use std::io::{self, IsTerminal};
use std::os::fd::AsFd;

use drumline_launch::{Order, OrderError};

/// Returns only if the order cannot be carried out.
pub(crate) fn on_host() -> anyhow::Result<()> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return Err(OrderError::NoOrder.into());
    }
    // Not through the buffer of `stdin`, which would consume some of what the agent must read.
    let order = Order::read(std::fs::File::from(stdin.as_fd().try_clone_to_owned()?))?;
    match order.exec()? {}
}
