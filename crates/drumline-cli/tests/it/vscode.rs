//! `.vscode/` matches `docs/debugging.md`: it is valid, and this `drumline` accepts its command lines.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::started::BINARY;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn json(name: &str) -> Value {
    let text = std::fs::read_to_string(root().join(".vscode").join(name)).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn texts(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
}

/// Replaces the variables of VS Code.
fn filled_in(argument: &str) -> String {
    let program = argument.replace("${input:program}", "launch_try");
    program.replace("${workspaceFolder}", "/work/program").replace("${file}", "train.py")
}

#[test]
fn each_configuration_is_complete_and_in_the_docs() {
    let docs = std::fs::read_to_string(root().join("docs/debugging.md")).unwrap();
    let (launch, tasks) = (json("launch.json"), json("tasks.json"));
    let configurations = launch["configurations"].as_array().unwrap();
    assert!(!configurations.is_empty());
    for configuration in configurations {
        let text =
            |name: &str| configuration[name].as_str().unwrap_or_else(|| panic!("{name}: {configuration}"));
        assert!(["lldb", "cppdbg", "debugpy"].contains(&text("type")), "{configuration}");
        assert!(["attach", "launch"].contains(&text("request")), "{configuration}");
        let name = text("name").split(" (").next().unwrap();
        assert!(docs.contains(name), "`{name}` is not in the docs");
    }
    for (file, uses) in [(&launch, launch.to_string()), (&tasks, tasks.to_string())] {
        let asked = file["inputs"].as_array().unwrap();
        assert!(
            asked.iter().all(|input| uses.contains(&format!("${{input:{}}}", input["id"].as_str().unwrap())))
        );
        assert_eq!(uses.contains("${input:program}"), asked.iter().any(|input| input["id"] == "program"));
    }
}

#[test]
fn the_commands_of_the_tasks_are_accepted() {
    let tasks = json("tasks.json");
    let ours = tasks["tasks"].as_array().unwrap().iter();
    let ours: Vec<_> = ours.filter(|task| task["command"].as_str().unwrap().ends_with("/drumline")).collect();
    assert_eq!(ours.len(), 2);
    for task in ours {
        let mut args: Vec<_> = texts(&task["args"]).into_iter().map(filled_in).collect();
        assert_eq!(args.remove(0), "run");
        let mut command = Command::new(BINARY);
        let output = command.args(["run", "--dry-run"]).args(args).env_remove("RANK").output().unwrap();
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success(), "{text}");
        assert!(text.contains("launch_try") && text.contains("rank 0") || text.contains("debugpy"), "{text}");
    }
}

#[test]
fn the_replacement_for_torchrun_starts_drumline() {
    let launch = json("launch.json");
    let configurations = launch["configurations"].as_array().unwrap();
    let form =
        configurations.iter().find(|form| form["program"].as_str().unwrap_or("").ends_with(".py")).unwrap();
    let file = form["program"].as_str().unwrap().replace("${workspaceFolder}", root().to_str().unwrap());
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("train.py"), "import os\nprint('rank', os.environ['RANK'])\n").unwrap();
    let args: Vec<_> = texts(&form["args"]).into_iter().map(filled_in).collect();
    let path = std::env::join_paths([
        Path::new(BINARY).parent().unwrap(),
        Path::new("/usr/local/bin"),
        Path::new("/usr/bin"),
        Path::new("/bin"),
    ]);
    let mut command = Command::new("python3");
    command.arg(file).args(args).current_dir(folder.path()).env("PATH", path.unwrap());
    let output = command.env_remove("RANK").env_remove("PYTHON_EXEC").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("[rank 0]: rank 0\n") && text.contains("[rank 1]: rank 1\n"), "{text}");
}
