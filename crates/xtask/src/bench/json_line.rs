//! The JSON object that a program prints as its result, whatever a launcher has put before it.

use anyhow::Context;
use serde_json::Value;

#[derive(Debug)]
pub(crate) struct JsonLine(Value);

impl JsonLine {
    /// The first of an output.
    pub(crate) fn find(stdout: &str) -> anyhow::Result<Self> {
        let object = stdout.lines().find_map(|line| line.find('{').map(|start| &line[start..]));
        Ok(Self(serde_json::from_str(object.context("no JSON object")?)?))
    }

    pub(crate) fn number(&self, key: &str) -> anyhow::Result<f64> {
        self.optional(key).with_context(|| format!("no number `{key}`"))
    }

    pub(crate) fn optional(&self, key: &str) -> Option<f64> {
        self.0[key].as_f64()
    }

    /// A list.
    pub(crate) fn numbers(&self, key: &str) -> anyhow::Result<Vec<f64>> {
        let list = self.0[key].as_array().with_context(|| format!("no list `{key}`"))?;
        Ok(list.iter().filter_map(Value::as_f64).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_found_behind_a_prefix() {
        let line = JsonLine::find("noise\n[rank 0]: {\"a\": 2.5, \"b\": [1.0, 0.5]}\n").unwrap();
        assert_eq!((line.number("a").unwrap(), line.optional("b")), (2.5, None));
        assert_eq!(line.numbers("b").unwrap(), [1.0, 0.5]);
        assert!(line.number("b").is_err() && line.numbers("a").is_err());
        assert!(JsonLine::find("nothing").is_err() && JsonLine::find("{\"a\": ").is_err());
    }
}
