//! JSON for people and programs: values of the outer levels have a line each, deeper values share one. So each tensor
//! of a manifest has a line.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter, Serializer};

/// Levels whose values have lines of their own: the manifest, its tensors, and a section of them.
const LEVELS: usize = 3;

pub(super) fn to_string(value: &impl Serialize) -> String {
    let mut text = Vec::new();
    let lines = Lines { outer: PrettyFormatter::new(), depth: 0 };
    value
        .serialize(&mut Serializer::with_formatter(&mut text, lines))
        .expect("a manifest has only string keys");
    text.push(b'\n');
    String::from_utf8(text).expect("JSON is text")
}

struct Lines {
    outer: PrettyFormatter<'static>,
    depth: usize,
}

impl Lines {
    /// Writes with the formatter for this depth.
    fn with<W: ?Sized, T>(
        &mut self,
        writer: &mut W,
        pretty: impl FnOnce(&mut PrettyFormatter<'static>, &mut W) -> T,
        compact: impl FnOnce(&mut CompactFormatter, &mut W) -> T,
    ) -> T {
        if self.depth <= LEVELS {
            pretty(&mut self.outer, writer)
        } else {
            compact(&mut CompactFormatter, writer)
        }
    }
}

/// Forwards each call to one of the two formatters. Calls that begin or end a level also count it.
macro_rules! formatted {
    ($($name:ident($($argument:ident: $type:ty)?) $(deeper by $deeper:literal)? $(then up by $up:literal)?;)*) => {
        impl Formatter for Lines {
            $(fn $name<W: ?Sized + Write>(&mut self, writer: &mut W $(, $argument: $type)?) -> io::Result<()> {
                $(self.depth += $deeper;)?
                let written = self.with(writer, |f, w| f.$name(w $(, $argument)?), |f, w| f.$name(w $(, $argument)?));
                $(self.depth -= $up;)?
                written
            })*
        }
    };
}

formatted! {
    begin_array() deeper by 1;
    end_array() then up by 1;
    begin_array_value(first: bool);
    end_array_value();
    begin_object() deeper by 1;
    end_object() then up by 1;
    begin_object_key(first: bool);
    begin_object_value();
    end_object_value();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deep_values_share_a_line_and_all_is_json() {
        let value = serde_json::json!({ "a": { "b": { "c": { "d": [1, { "e": [] }] }, "f": [] } }, "g": [1, "x"], "h": null });
        let text = to_string(&value);
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
        let expected = "{\n  \"a\": {\n    \"b\": {\n      \"c\": {\"d\":[1,{\"e\":[]}]},\n      \"f\": []\n    }\n  },\n  \
            \"g\": [\n    1,\n    \"x\"\n  ],\n  \"h\": null\n}\n";
        assert_eq!(text, expected);
    }
}
