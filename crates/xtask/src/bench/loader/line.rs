//! The JSON line that both sides print.

use anyhow::{Context, ensure};
use serde_json::Value;

/// What a run said.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    pub(crate) samples_per_s: f64,
    pub(crate) shape: Vec<u64>,
    pub(crate) mean: f64,
}

/// The last line of a program's output.
pub(crate) fn parse(stdout: &str) -> anyhow::Result<Line> {
    let last = stdout.lines().last().context("it printed nothing")?;
    let value: Value = serde_json::from_str(last).with_context(|| format!("not JSON: {last}"))?;
    let number = |name: &str| value[name].as_f64().with_context(|| format!("no number `{name}` in {last}"));
    let shape = value["shape"].as_array().with_context(|| format!("no list `shape` in {last}"))?;
    let (samples_per_s, mean) = (number("samples_per_s")?, number("mean")?);
    ensure!(samples_per_s > 0.0, "no samples: {last}");
    Ok(Line { samples_per_s, shape: shape.iter().filter_map(Value::as_u64).collect(), mean })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_counts_and_must_be_whole() {
        let good =
            "building\n{\"samples_per_s\":1234.5,\"shape\":[128,3,32,32],\"mean\":-0.2,\"with\":\"torch\"}\n";
        let line = Line { samples_per_s: 1234.5, shape: vec![128, 3, 32, 32], mean: -0.2 };
        assert_eq!(parse(good).unwrap(), line);
        for (bad, told) in [
            ("", "it printed nothing"),
            ("hello", "not JSON: hello"),
            ("{\"samples_per_s\":1}", "no list `shape`"),
            ("{\"samples_per_s\":1,\"shape\":[]}", "no number `mean`"),
            ("{\"samples_per_s\":0,\"shape\":[],\"mean\":0}", "no samples"),
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
    }
}
