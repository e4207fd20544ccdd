//! `drumline watch`: serves the page of one run or several until Ctrl-C.
//!
//! stdout gets only the address; everything else goes to stderr.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use drumline_observe::page::{Page, Runs};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::errors::print_line;

const EXAMPLES: &str = "\
Examples:
  drumline watch                        all your jobs that run on this machine
  drumline watch exp/resnet18           one run: while it runs, after its end, or before it has begun
  drumline watch exp                    all runs one level down, in the same charts
  drumline watch --port 0 exp/resnet18  on any free port

Open the printed address in a browser on this machine. From another one, forward the same port first, as the page answers \
to no other name:
  ssh -L 6116:127.0.0.1:6116 HOST

The page shows curves (loss, metrics, learning rate, samples/s; dashed: evaluation) over steps or time, a row for each rank (what \
it waits for, how it spends its time, memory; stragglers and lost ranks are marked), the configuration and the end of the log. \
Dragging over a chart zooms in all of them. It reads OUT_DIR's metrics.jsonl, ranks/ and log.txt and changes nothing; the job is \
not affected.

The address has a new token each time: only those who have it can see the page. Ctrl-C closes the page.";

/// Show runs in a browser: curves, ranks, log
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct WatchArgs {
    /// OUT_DIR of each run, also one that does not exist yet, or the folder above [default: all your running jobs]
    #[arg(value_name = "DIR")]
    folders: Vec<PathBuf>,
    /// Port of 127.0.0.1, or the next free one; 0: any
    #[arg(long, value_name = "N", default_value_t = 6116)]
    port: u16,
}

/// Serves the page until a signal ends it.
pub(crate) fn watch(args: WatchArgs) -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot wait for Ctrl-C")?;
    let what = match args.folders.len() {
        0 => "all your jobs that run here".to_owned(),
        1 => args.folders[0].display().to_string(),
        several => format!("{several} runs"),
    };
    let runs = if args.folders.is_empty() { Runs::Running } else { Runs::Folders(args.folders) };
    let missing: Vec<_> = match &runs {
        Runs::Folders(folders) => folders.iter().filter(|folder| !folder.exists()).cloned().collect(),
        Runs::Running => Vec::new(),
    };
    let page = Page::bind(args.port, runs)?;
    let (url, port) = (page.url(), page.port());
    let serving = page.start()?;
    writeln!(std::io::stdout(), "{url}").context("cannot print the page's address")?;
    if args.port != 0 && port != args.port {
        print_line(&format!("note: port {} is taken; this page has {port}", args.port));
    }
    for folder in missing {
        print_line(&format!(
            "note: {} does not exist yet; the page shows its run as soon as it does",
            folder.display()
        ));
    }
    print_line(&format!("watching {what}; open the address above, Ctrl-C closes the page"));
    signals.forever().next();
    drop(serving);
    Ok(())
}
