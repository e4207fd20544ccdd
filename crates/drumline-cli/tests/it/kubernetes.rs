//! The manifests of `docs/kubernetes/`: they are valid YAML, and this `drumline` accepts their commands and variables.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use drumline_rendezvous::{JobKey, KeyError};
use serde_json::Value;

use super::job::{Job, free_port};
use super::started::{BINARY, Started};

const LONG: Duration = Duration::from_secs(40);
/// The path of the job's key in the manifests.
const KEY_FILE: &str = "/run/drumline/job.key";

/// One pod, as the cluster would start it.
struct Pod {
    spec: Value,
    variables: BTreeMap<String, String>,
}

impl Pod {
    fn command(&self) -> Vec<&str> {
        let words = self.spec["containers"][0]["command"].as_array().unwrap();
        words.iter().map(|word| word.as_str().unwrap()).collect()
    }

    /// The plan of its `drumline run`.
    fn plan(&self) -> String {
        let command = self.command();
        assert_eq!(command[..2], ["drumline", "run"]);
        let args = [&["run", "--dry-run"], &command[2..]].concat();
        let variables: Vec<_> =
            self.variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let ended = Started::with_variables(&args, &variables).end();
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended.stdout
    }
}

fn documents(name: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/kubernetes").join(name);
    let text = fs::read_to_string(path).unwrap();
    serde_saphyr::from_multiple(&text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text")).to_string()
}

/// The pods of `indexed-job.yaml`: the Job's controller gives each its index.
fn pods_of_the_indexed_job() -> Vec<Pod> {
    let job = documents("indexed-job.yaml").into_iter().find(|document| document["kind"] == "Job").unwrap();
    let count = job["spec"]["completions"].as_u64().unwrap();
    let pod = |index: u64| {
        let spec = job["spec"]["template"]["spec"].clone();
        let value = |entry: &Value| match entry["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
            Some(path) => {
                assert_eq!(path, "metadata.annotations['batch.kubernetes.io/job-completion-index']");
                index.to_string()
            }
            None => text(&entry["value"]),
        };
        let env = spec["containers"][0]["env"].as_array().unwrap();
        let variables = env.iter().map(|entry| (text(&entry["name"]), value(entry))).collect();
        Pod { spec, variables }
    };
    (0..count).map(pod).collect()
}

/// The pods of `pytorchjob.yaml`, with all that the training operator adds to their environment.
fn pods_of_the_pytorchjob() -> Vec<Pod> {
    let job = documents("pytorchjob.yaml").remove(0);
    let specs = &job["spec"]["pytorchReplicaSpecs"];
    let replicas = |kind: &str| specs[kind]["replicas"].as_u64().unwrap() as usize;
    let (masters, num_nodes) = (replicas("Master"), replicas("Master") + replicas("Worker"));
    assert_eq!(masters, 1);
    let master = format!("{}-master-0", text(&job["metadata"]["name"]));
    let pod = |rank: usize| {
        let spec = specs[if rank == 0 { "Master" } else { "Worker" }]["template"]["spec"].clone();
        assert_eq!(spec["containers"][0]["name"], "pytorch");
        let own = spec["containers"][0]["env"].as_array().unwrap();
        let mut variables: BTreeMap<_, _> =
            own.iter().map(|entry| (text(&entry["name"]), text(&entry["value"]))).collect();
        let set = [
            ("PYTHONUNBUFFERED", "0".to_string()),
            ("MASTER_ADDR", master.clone()),
            ("MASTER_PORT", "23456".to_string()),
            ("PET_MASTER_ADDR", master.clone()),
            ("PET_MASTER_PORT", "23456".to_string()),
            ("WORLD_SIZE", (num_nodes * 4).to_string()),
            ("RANK", rank.to_string()),
            ("PET_NPROC_PER_NODE", text(&job["spec"]["nprocPerNode"])),
            ("PET_NODE_RANK", rank.to_string()),
            ("PET_NNODES", num_nodes.to_string()),
        ];
        variables.extend(set.map(|(name, value)| (name.to_string(), value)));
        Pod { spec, variables }
    };
    (0..num_nodes).map(pod).collect()
}

#[test]
fn the_command_and_variables_of_each_pod_are_accepted() {
    let meetings = [
        (pods_of_the_indexed_job(), "static, at train-0.train port 29500"),
        (pods_of_the_pytorchjob(), "static, at train-master-0 port 23456"),
    ];
    for (pods, meeting) in meetings {
        assert_eq!(pods.len(), 2);
        for (node, pod) in pods.iter().enumerate() {
            let plan = pod.plan();
            assert!(plan.contains(&format!("2; this is node {node}")) && plan.contains(meeting), "{plan}");
            for local_rank in 0..4 {
                let rank = 4 * node + local_rank;
                assert!(plan.contains(&format!("rank {rank} (local rank {local_rank} of 4)")), "{plan}");
            }
            assert_eq!(plan.matches("train.py --lr 0.1\n").count(), 4, "{plan}");
        }
    }
}

#[test]
fn the_service_names_the_pods_of_the_job() {
    let documents = documents("indexed-job.yaml");
    let [service, job] = &documents[..] else { panic!("{} documents", documents.len()) };
    let pod = &job["spec"]["template"]["spec"];
    assert_eq!((&service["kind"], &service["spec"]["clusterIP"]), (&"Service".into(), &"None".into()));
    assert_eq!(service["metadata"]["name"], pod["subdomain"]);
    assert_eq!(service["spec"]["selector"]["job-name"], job["metadata"]["name"]);
    let master = format!("{}-0.{}", text(&job["metadata"]["name"]), text(&pod["subdomain"]));
    assert_eq!(pods_of_the_indexed_job()[0].variables["PET_MASTER_ADDR"], master);
}

/// Writes a key as the cluster would, with `mode`, and reads it as an agent does.
fn key_with(mode: u32) -> Result<JobKey, KeyError> {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), &*JobKey::random().to_hex()).unwrap();
    fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).unwrap();
    JobKey::from_file(file.path())
}

#[test]
fn the_mounted_key_is_one_that_an_agent_accepts() {
    for pod in pods_of_the_indexed_job().iter().chain(&pods_of_the_pytorchjob()) {
        assert_eq!(pod.variables["DRUMLINE_JOB_KEY_FILE"], KEY_FILE);
        let mount = &pod.spec["containers"][0]["volumeMounts"][0];
        let volume = &pod.spec["volumes"][0];
        assert_eq!(Path::new(KEY_FILE).parent().unwrap().to_str(), mount["mountPath"].as_str());
        assert_eq!(mount["name"], volume["name"]);
        let mode = volume["secret"]["defaultMode"].as_u64().unwrap() as u32;
        assert_eq!(mode, 0o400);
        key_with(mode).unwrap();
    }
    // The mode that Kubernetes sets for a pod with an fsGroup is refused.
    assert!(matches!(key_with(0o440), Err(KeyError::Exposed { .. })));
}

#[test]
fn the_pods_meet_when_they_are_run_here() {
    let key = tempfile::NamedTempFile::new().unwrap();
    fs::write(key.path(), &*JobKey::random().to_hex()).unwrap();
    let port = free_port().to_string();
    let run = |pod: &Pod| {
        let mut command = Command::new(BINARY);
        command.args(["run", "sh", "-c", "echo rank $RANK of $WORLD_SIZE on node $GROUP_RANK"]);
        command.envs(&pod.variables).env("DRUMLINE_JOB_KEY_FILE", key.path());
        command.env("PET_MASTER_ADDR", "127.0.0.1").env("PET_MASTER_PORT", &port);
        Job::of(command)
    };
    let mut jobs: Vec<_> = pods_of_the_pytorchjob().iter().map(run).collect();
    for (node, job) in jobs.iter_mut().enumerate() {
        let (code, text) = job.end(LONG);
        assert_eq!(code, 0, "{text}");
        for rank in 4 * node..4 * node + 4 {
            assert!(text.contains(&format!("rank {rank} of 8 on node {node}")), "{text}");
        }
    }
}
