//! A real headless browser, controlled through its driver.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fantoccini::{Client, ClientBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use rank_test::require_tool;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

const LONGEST: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(50);
const READY: &str = "started successfully on port ";

/// The browser. It is closed when dropped.
pub(super) struct Chromium {
    runtime: Runtime,
    client: Client,
    _driver: Driver,
}

/// The process of chromedriver. SIGTERM makes it end its browsers; SIGKILL would leave them running. The folder holds the files
/// that they do not remove.
struct Driver(Child, #[expect(dead_code, reason = "removed when dropped")] TempDir);

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        let _ = self.0.wait();
    }
}

impl Chromium {
    /// `None` if there is no browser.
    pub(super) fn start(width: u32, height: u32) -> Option<Self> {
        if !require_tool("chromium") || !require_tool("chromedriver") {
            return None;
        }
        let (driver, port) = start_driver();
        let window = format!("--window-size={width},{height}");
        // The sandbox does not work as root, and is not needed, since the browser only opens local pages.
        let args = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            &window,
        ];
        let capabilities = json!({"goog:chromeOptions": {"args": args}});
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut builder = ClientBuilder::new(HttpConnector::new());
        builder.capabilities(capabilities.as_object().unwrap().clone());
        let address = format!("http://127.0.0.1:{port}");
        let client = runtime.block_on(builder.connect(&address)).unwrap();
        Some(Self { runtime, client, _driver: driver })
    }

    pub(super) fn open(&self, url: &str) {
        self.runtime.block_on(self.client.goto(url)).unwrap();
    }

    /// The value of an expression in the page.
    pub(super) fn value(&self, expression: &str) -> Value {
        let script = format!("return {expression};");
        self.runtime.block_on(self.client.execute(&script, Vec::new())).unwrap()
    }

    /// Waits until an expression is true, and calls `meanwhile` again and again.
    pub(super) fn wait_while(&self, expression: &str, mut meanwhile: impl FnMut()) {
        let begin = Instant::now();
        while self.value(&format!("Boolean({expression})")) != true {
            let body = || self.value("document.body.innerText");
            assert!(begin.elapsed() < LONGEST, "never true: {expression}\n{}", body());
            meanwhile();
            std::thread::sleep(TICK);
        }
    }

    pub(super) fn wait(&self, expression: &str) {
        self.wait_while(expression, || ());
    }

    /// A picture of the window, as PNG.
    pub(super) fn screenshot(&self) -> Vec<u8> {
        self.runtime.block_on(self.client.screenshot()).unwrap()
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        let _ = self.runtime.block_on(self.client.clone().close());
    }
}

fn start_driver() -> (Driver, u16) {
    let scratch = TempDir::new().unwrap();
    let mut command = Command::new("chromedriver");
    command.arg("--port=0").env("TMPDIR", scratch.path());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let driver = Driver(child, scratch);
    let port = lines.find_map(|line| Some(line.split_once(READY)?.1.trim_end_matches('.').to_owned()));
    let port = port.expect("the driver prints its port").parse().unwrap();
    // Later output is read and dropped, so that the driver never blocks on a full pipe.
    std::thread::spawn(move || lines.for_each(drop));
    (driver, port)
}
