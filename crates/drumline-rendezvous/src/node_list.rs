//! Expands Slurm's short form of many host names: `n[1-3,07-09],gpu5` is n1 n2 n3 n07 n08 n09 gpu5.
//!
//! A list is names separated by commas. A name may contain any number of `[..]`, each with numbers and ranges, and
//! stands for every combination; the last bracket changes fastest. A range keeps the number of digits of its first
//! number (`07-09`).

/// The most names that a list may stand for.
pub const MAX_NODES: usize = 65_536;

/// Why a node list is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeListError {
    /// The syntax is wrong.
    #[error("node list {list:?}: {source}")]
    Syntax {
        /// The list.
        list: String,
        /// What is wrong with it.
        #[source]
        source: NodeListSyntaxError,
    },
    /// It stands for too many names.
    #[error("node list {list:?} stands for more than {MAX_NODES} names")]
    TooMany {
        /// The list.
        list: String,
    },
}

/// What is wrong with the syntax of a node list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeListSyntaxError {
    /// A bracket is in the wrong place.
    #[error("unexpected `{bracket}` at position {at}")]
    Bracket {
        /// The bracket.
        bracket: char,
        /// Its position.
        at: usize,
    },
    /// The list contains white space.
    #[error("unexpected white space at position {at}")]
    WhiteSpace {
        /// Its position.
        at: usize,
    },
    /// A bracket is not closed.
    #[error("a `[` is not closed")]
    NotClosed,
    /// A name is empty.
    #[error("a name is empty")]
    EmptyName,
    /// The end of a range is below its start.
    #[error("range `{0}` runs backwards")]
    Backwards(String),
    /// A range is not made of numbers.
    #[error("`{0}` is not a number or a range of numbers")]
    NotANumber(String),
}

enum ExpandError {
    Syntax(NodeListSyntaxError),
    TooMany,
}

impl From<NodeListSyntaxError> for ExpandError {
    fn from(error: NodeListSyntaxError) -> Self {
        ExpandError::Syntax(error)
    }
}

/// All names, in order.
///
/// ```
/// let nodes = drumline_rendezvous::node_list::expand("rack[1-2]n[01-02],gpu5")?;
/// assert_eq!(nodes, ["rack1n01", "rack1n02", "rack2n01", "rack2n02", "gpu5"]);
/// # Ok::<(), drumline_rendezvous::node_list::NodeListError>(())
/// ```
pub fn expand(list: &str) -> Result<Vec<String>, NodeListError> {
    let shown = || list.chars().take(200).collect();
    expand_all(list).map_err(|error| match error {
        ExpandError::Syntax(source) => NodeListError::Syntax { list: shown(), source },
        ExpandError::TooMany => NodeListError::TooMany { list: shown() },
    })
}

fn expand_all(list: &str) -> Result<Vec<String>, ExpandError> {
    let mut nodes = Vec::new();
    for item in split_outside_brackets(list)? {
        nodes.extend(expand_item(item)?);
        if nodes.len() > MAX_NODES {
            return Err(ExpandError::TooMany);
        }
    }
    Ok(nodes)
}

fn split_outside_brackets(list: &str) -> Result<Vec<&str>, ExpandError> {
    let mut items = Vec::new();
    let mut start = 0;
    let mut inside = false;
    for (at, c) in list.char_indices() {
        match c {
            '[' if !inside => inside = true,
            ']' if inside => inside = false,
            '[' | ']' => return Err(NodeListSyntaxError::Bracket { bracket: c, at }.into()),
            ',' if !inside => {
                items.push(&list[start..at]);
                start = at + 1;
            }
            c if c.is_whitespace() || c.is_control() => {
                return Err(NodeListSyntaxError::WhiteSpace { at }.into());
            }
            _ => {}
        }
    }
    if inside {
        return Err(NodeListSyntaxError::NotClosed.into());
    }
    items.push(&list[start..]);
    Ok(items)
}

/// Expands one name; its brackets are balanced and not nested.
fn expand_item(item: &str) -> Result<Vec<String>, ExpandError> {
    if item.is_empty() {
        return Err(NodeListSyntaxError::EmptyName.into());
    }
    let mut names = vec![String::new()];
    let mut rest = item;
    while let Some((literal, after)) = rest.split_once('[') {
        let (ranges, after) = after.split_once(']').unwrap_or((after, ""));
        let numbers = expand_ranges(ranges)?;
        if names.len() * numbers.len() > MAX_NODES {
            return Err(ExpandError::TooMany);
        }
        names = names
            .iter()
            .flat_map(|name| numbers.iter().map(move |n| format!("{name}{literal}{n}")))
            .collect();
        rest = after;
    }
    names.iter_mut().for_each(|name| name.push_str(rest));
    Ok(names)
}

fn expand_ranges(ranges: &str) -> Result<Vec<String>, ExpandError> {
    let mut numbers = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let from = number(first, range)?;
        let to = number(last, range)?;
        if from > to {
            return Err(NodeListSyntaxError::Backwards(range.into()).into());
        }
        if to - from >= MAX_NODES as u64 || numbers.len() > MAX_NODES {
            return Err(ExpandError::TooMany);
        }
        numbers.extend((from..=to).map(|n| format!("{n:0width$}", width = first.len())));
    }
    Ok(numbers)
}

fn number(digits: &str, range: &str) -> Result<u64, NodeListSyntaxError> {
    let plain = !digits.is_empty() && digits.len() <= 18 && digits.bytes().all(|b| b.is_ascii_digit());
    let bad = || NodeListSyntaxError::NotANumber(range.into());
    if plain { digits.parse().map_err(|_| bad()) } else { Err(bad()) }
}

/// The number of tasks on node `node` in Slurm's `4(x2),3`: four on the first two nodes, three on the third.
pub fn tasks_on_node(list: &str, node: usize) -> Option<usize> {
    let mut before = 0;
    for part in list.split(',') {
        let (tasks, times) = match part.split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
            None => (part, 1usize),
        };
        before = usize::checked_add(before, times)?;
        if node < before {
            return tasks.parse().ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn examples() {
        let cases = [
            ("gpu5", "gpu5"),
            ("a,b", "a b"),
            ("n[1-3,07-09],gpu5", "n1 n2 n3 n07 n08 n09 gpu5"),
            ("n[9-11]", "n9 n10 n11"),
            ("n[098-101]", "n098 n099 n100 n101"),
            ("rack[1-2]n[01-02]", "rack1n01 rack1n02 rack2n01 rack2n02"),
            ("n[1,3]-ib,x[0]", "n1-ib n3-ib x0"),
            ("node-a.b.example", "node-a.b.example"),
        ];
        for (list, nodes) in cases {
            assert_eq!(expand(list).unwrap().join(" "), nodes, "{list}");
        }
    }

    #[test]
    fn errors_name_the_problem() {
        let cases = [
            ("", "empty"),
            ("a,,b", "empty"),
            ("n[1-2", "not closed"),
            ("n1]", "unexpected `]` at position 2"),
            ("n[[1]]", "unexpected `[`"),
            ("n[3-1]", "`3-1` runs backwards"),
            ("n[]", "not a number"),
            ("n[a-b]", "`a-b` is not a number"),
            ("n[1-2-3]", "is not a number"),
            ("n[-1]", "is not a number"),
            ("a b", "white space"),
            ("n[0-99999999999999999999]", "is not a number"),
            ("n[0-65536]", "more than 65536"),
            ("n[0-999][0-999]", "more than 65536"),
            ("n[0-65535],x", "more than 65536"),
        ];
        for (list, part) in cases {
            let error = expand(list).unwrap_err().to_string();
            assert!(error.contains(part), "{list}: {error}");
        }
        assert_eq!(expand("n[0-65535]").unwrap().len(), MAX_NODES);
    }

    #[test]
    fn tasks() {
        let tasks: Vec<_> = (0..5).map(|node| tasks_on_node("4(x2),3,1", node)).collect();
        assert_eq!(tasks, [Some(4), Some(4), Some(3), Some(1), None]);
        assert_eq!(tasks_on_node("4(x2", 0), None);
        assert_eq!(tasks_on_node("x", 0), None);
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(list in "[n0-9,\\[\\]-]{0,40}") {
            let _ = expand(&list);
        }

        #[test]
        fn plain_names_are_returned_unchanged(names in proptest::collection::vec("[a-z]{1,4}[0-9]{0,3}", 1..20)) {
            prop_assert_eq!(expand(&names.join(",")).unwrap(), names);
        }
    }
}
