//! The files of the page, compiled into the program.

/// A file to send.
#[derive(Debug)]
pub(super) struct Asset {
    path: &'static str,
    pub(super) kind: &'static str,
    pub(super) text: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

const ASSETS: [Asset; 13] = [
    Asset { path: "/", kind: HTML, text: include_str!("assets/index.html") },
    Asset { path: "/page.css", kind: CSS, text: include_str!("assets/page.css") },
    Asset { path: "/icon.svg", kind: "image/svg+xml", text: include_str!("assets/icon.svg") },
    Asset { path: "/page.js", kind: SCRIPT, text: include_str!("assets/page.js") },
    Asset { path: "/runs.js", kind: SCRIPT, text: include_str!("assets/runs.js") },
    Asset { path: "/chart.js", kind: SCRIPT, text: include_str!("assets/chart.js") },
    Asset { path: "/config.js", kind: SCRIPT, text: include_str!("assets/config.js") },
    Asset { path: "/detail.js", kind: SCRIPT, text: include_str!("assets/detail.js") },
    Asset { path: "/view.js", kind: SCRIPT, text: include_str!("assets/view.js") },
    Asset { path: "/zoom.js", kind: SCRIPT, text: include_str!("assets/zoom.js") },
    Asset { path: "/ranks.js", kind: SCRIPT, text: include_str!("assets/ranks.js") },
    Asset { path: "/elements.js", kind: SCRIPT, text: include_str!("assets/elements.js") },
    Asset { path: "/scale.js", kind: SCRIPT, text: include_str!("assets/scale.js") },
];

/// The file with exactly this path.
pub(super) fn find(path: &str) -> Option<&'static Asset> {
    ASSETS.iter().find(|asset| asset.path == path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_loaded_from_elsewhere_and_nothing_is_inline() {
        for asset in &ASSETS {
            // A namespace, not an address.
            let text = asset.text.replace("http://www.w3.org/2000/svg", "");
            for word in [
                "http:",
                "https:",
                "//cdn",
                "innerHTML",
                "outerHTML",
                "document.write",
                "eval(",
                "insertAdjacentHTML",
            ] {
                assert!(!text.contains(word), "{} has {word}", asset.path);
            }
            for word in ["<script>", " style=", " onclick=", " onload=", "<style"] {
                assert!(!text.contains(word), "{} has {word}", asset.path);
            }
        }
    }

    #[test]
    fn each_script_that_is_imported_is_there() {
        for asset in ASSETS.iter().filter(|asset| asset.kind == SCRIPT) {
            for line in asset.text.lines().filter(|line| line.starts_with("import ")) {
                let path = line.split('"').nth(1).unwrap();
                assert!(find(path).is_some(), "{} imports {path}", asset.path);
            }
        }
        assert!(find("/page.js/").is_none() && find("/../page.js").is_none() && find("").is_none());
    }
}
