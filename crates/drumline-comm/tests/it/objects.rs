//! Objects of any size and shape, and those that cannot be read.

use std::collections::BTreeMap;

use drumline_comm::{CommError, Transport};
use serde::{Deserialize, Serialize};

use crate::threads::{BOTH, run};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Report {
    rank: usize,
    name: String,
    losses: Vec<f64>,
    notes: BTreeMap<String, Option<bool>>,
}

fn report(rank: usize) -> Report {
    let notes = (0..rank).map(|i| (format!("note {i} \"\u{1F941}\""), (i > 1).then_some(true))).collect();
    Report { rank, name: "ä".repeat(rank * 7), losses: vec![0.1, -1e300, 1.0 / 3.0], notes }
}

#[test]
fn every_call_brings_the_object_unchanged() {
    for transport in BOTH {
        for ranks in [1, 2, 3, 5] {
            run(ranks, transport, |group| {
                let (me, ranks) = (group.rank(), group.size());
                let mine = report(me);
                let all: Vec<_> = (0..ranks).map(report).collect();
                assert_eq!(group.all_gather_object(&mine)?, all);
                for root in 0..ranks {
                    assert_eq!(
                        group.broadcast_object(Some(&mine).filter(|_| me == root), root)?,
                        report(root)
                    );
                    let gathered = group.gather_object(&mine, root)?;
                    assert_eq!(gathered, (me == root).then(|| all.clone()));
                    let backwards: Vec<_> = all.iter().rev().cloned().collect();
                    let dealt = group.scatter_object(Some(&backwards[..]).filter(|_| me == root), root)?;
                    assert_eq!(dealt, report(ranks - 1 - me));
                }
                Ok(())
            });
        }
    }
}

#[test]
fn objects_of_several_megabytes() {
    for transport in BOTH {
        run(3, transport, |group| {
            let text = |rank: usize| "0123456789".repeat(150_000 * (rank + 1));
            let all = group.all_gather_object(&text(group.rank()))?;
            assert!(all.iter().enumerate().all(|(rank, got)| *got == text(rank)));
            let root = text(2);
            assert!(group.broadcast_object(Some(&root).filter(|_| group.rank() == 2), 2)? == root);
            let parts: Vec<_> = (0..3).map(text).collect();
            assert!(
                group.scatter_object((group.rank() == 1).then_some(&parts[..]), 1)? == text(group.rank())
            );
            Ok(())
        });
    }
}

#[test]
fn nothing_is_an_object_too() {
    run(2, Transport::Auto, |group| {
        assert_eq!(group.all_gather_object(&())?, [(), ()]);
        assert_eq!(group.broadcast_object((group.rank() == 0).then_some(&String::new()), 0)?, "");
        Ok(())
    });
}

/// Written as a number by even ranks and as text by odd ones; only numbers can be read.
#[derive(Debug, PartialEq)]
struct Moody(usize);

impl Serialize for Moody {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            99 => Err(serde::ser::Error::custom("99 cannot be written")),
            n if n.is_multiple_of(2) => serializer.serialize_u64(n as u64),
            _ => serializer.serialize_str("odd"),
        }
    }
}

impl<'de> Deserialize<'de> for Moody {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        usize::deserialize(deserializer).map(Moody)
    }
}

#[test]
fn an_object_that_cannot_be_read_is_an_error_and_the_group_goes_on() {
    for transport in BOTH {
        run(2, transport, |group| {
            let me = group.rank();
            match group.all_gather_object(&Moody(me)) {
                Err(error @ CommError::Object { .. }) => {
                    let text = error.to_string();
                    assert!(
                        text.contains("reading of an object failed") && text.contains("\"odd\""),
                        "{text}"
                    );
                }
                other => panic!("{other:?}"),
            }
            // The control: what can be read is.
            assert_eq!(group.all_gather_object(&Moody(2 * me))?, [Moody(0), Moody(2)]);
            Ok(())
        });
    }
}

#[test]
fn an_object_that_cannot_be_written_sends_nothing() {
    run(2, Transport::Auto, |group| {
        assert!(matches!(
            group.all_gather_object(&Moody(99)),
            Err(CommError::Object { what: "writing", .. })
        ));
        group.barrier()
    });
}

#[test]
fn a_root_without_its_objects_is_told_so() {
    run(1, Transport::Auto, |group| {
        let outcome = group.broadcast_object::<u8>(None, 0);
        assert!(outcome.unwrap_err().to_string().contains("must give the object"));
        let outcome = group.scatter_object(Some(&[1u8, 2]), 0);
        assert!(outcome.unwrap_err().to_string().contains("must give 1 objects, got 2"));
        group.barrier()
    });
}
