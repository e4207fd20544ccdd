//! What every contender prints: the JSON array of `drumline bench --json`.

use anyhow::Context;
use serde_json::Value;

/// One measured size of one operation; the fields of the array that the comparison needs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Record {
    pub(crate) bytes: u64,
    pub(crate) backend: String,
    pub(crate) median_us: f64,
    pub(crate) p99_us: f64,
}

/// Reads a contender's stdout; launchers may have printed lines of their own before the array.
pub(crate) fn parse(stdout: &str) -> anyhow::Result<Vec<Record>> {
    let array = stdout.find('[').map_or(stdout, |start| &stdout[start..]);
    let shown: String = stdout.chars().take(200).collect();
    let not_ours = || format!("expected a JSON array of results, got `{shown}`");
    let values: Vec<Value> = serde_json::from_str(array).with_context(not_ours)?;
    values.iter().map(|value| Record::of(value).with_context(not_ours)).collect()
}

impl Record {
    fn of(value: &Value) -> Option<Self> {
        Some(Self {
            bytes: value["bytes"].as_u64()?,
            backend: value["backend"].as_str()?.to_owned(),
            median_us: value["median_us"].as_f64()?,
            p99_us: value["p99_us"].as_f64()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_contract_is_understood() {
        let text = r#"[{"op":"all-reduce","world":2,"bytes":16,"dtype":"f32","memory":"private","backend":"mpich",
            "transport":"shm","median_us":0.7,"p99_us":1.1,"algbw_gbps":0.02,"busbw_gbps":0.02}]"#;
        let records = parse(text).unwrap();
        assert_eq!((records[0].backend.as_str(), records[0].bytes, records[0].median_us), ("mpich", 16, 0.7));
        assert_eq!(parse("[\n\n]\n").unwrap(), []);
    }

    #[test]
    fn a_broken_answer_is_an_error() {
        assert!(parse("").is_err());
        assert!(parse("[{\"op\":\"all-reduce\"").is_err());
        assert!(parse("[{\"op\":\"all-reduce\"}]").is_err());
    }
}
