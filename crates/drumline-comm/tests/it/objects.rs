//! Objects of any size and type, and objects that cannot be read.

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
fn every_call_delivers_the_object_unchanged() {
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
fn fifty_mebibytes_of_bytes() {
    for transport in BOTH {
        run(2, transport, |group| {
            let bytes: Vec<u8> = (0..50 << 20).map(|i: u32| (i % 251) as u8).collect();
            let got = group.broadcast_object((group.rank() == 1).then_some(&bytes), 1)?;
            assert!(got == bytes);
            Ok(())
        });
    }
}

#[test]
fn nan_and_infinities_arrive_bit_for_bit() {
    for transport in BOTH {
        run(2, transport, |group| {
            let doubles = [f64::NAN, -f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, f64::MIN_POSITIVE];
            let floats = doubles.map(|x| x as f32);
            for (theirs, narrow) in group.all_gather_object(&(doubles, floats))? {
                assert_eq!(theirs.map(f64::to_bits), doubles.map(f64::to_bits));
                assert_eq!(narrow.map(f32::to_bits), floats.map(f32::to_bits));
            }
            Ok(())
        });
    }
}

/// Types that a format without names and tags could not represent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Shape {
    Unit,
    Newtype(Option<Box<Shape>>),
    Tuple(u8, String),
    Struct {
        #[serde(flatten)]
        inner: Inner,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        left_out: Option<i8>,
        any: Vec<Untagged>,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Inner {
    name: String,
    bytes: Vec<u8>,
    limits: (f32, f64),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Untagged {
    Byte(u8),
    Real(f64),
    Text(String),
    Bytes(Vec<u8>),
    Map(BTreeMap<i32, bool>),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Tagged {
    Empty,
    Full { shapes: Vec<Shape>, big: u64, small: i64 },
}

#[test]
fn nested_enums_flattened_and_untagged() {
    let inner = Inner { name: "n".into(), bytes: vec![0, 255, 7], limits: (f32::MAX, f64::INFINITY) };
    let any = vec![
        Untagged::Byte(1),
        Untagged::Text("two".into()),
        Untagged::Real(f64::NEG_INFINITY),
        Untagged::Bytes(vec![200, 3]),
        Untagged::Map([(-4, true)].into()),
    ];
    let shapes = vec![
        Shape::Unit,
        Shape::Newtype(None),
        Shape::Newtype(Some(Box::new(Shape::Newtype(Some(Box::new(Shape::Unit)))))),
        Shape::Tuple(9, "t".into()),
        Shape::Struct { inner, left_out: None, any },
    ];
    let full = Tagged::Full { shapes, big: u64::MAX, small: i64::MIN };
    run(2, Transport::Auto, move |group| {
        let mine = if group.rank() == 0 { Tagged::Empty } else { full.clone() };
        assert_eq!(group.all_gather_object(&mine)?, [Tagged::Empty, full.clone()]);
        Ok(())
    });
}

/// Each rank expects another type: the bytes say what they are.
#[test]
fn another_type_is_an_error_with_rank_and_types_and_the_group_stays_usable() {
    for transport in BOTH {
        run(3, transport, |group| {
            let me = group.rank();
            let error = match me {
                1 => group.broadcast_object(Some(&"a text".to_string()), 1).map(drop),
                _ => group.broadcast_object::<Vec<u64>>(None, 1).map(drop),
            };
            match error {
                Ok(()) => assert_eq!(me, 1, "only the sender reads what it has sent"),
                Err(error) => {
                    assert!(matches!(error, CommError::Object { what: "reading", .. }), "{error}");
                    let text = error.to_string();
                    for part in ["rank 1 sent a `alloc::string::String`", "reads a `alloc::vec::Vec<u64>`"] {
                        assert!(text.contains(part), "{text}");
                    }
                }
            }
            let names = group.all_gather_object(&me.to_string())?;
            assert_eq!(names, ["0", "1", "2"]);
            Ok(())
        });
    }
}

/// Bytes that are no object at all, sent instead of one by the calls that an object consists of.
#[test]
fn corrupt_bytes_are_an_error_and_the_group_stays_usable() {
    for transport in BOTH {
        run(2, transport, |group| {
            // The last: an array of four billion elements, of which none comes.
            let corrupt: [&[u8]; 4] = [b"", b"\xc1\xff", b"not an object", b"\x92\xa1x\xdd\xff\xff\xff\xff"];
            for bytes in corrupt {
                if group.rank() == 0 {
                    let mut data = bytes.to_vec();
                    group.broadcast(&mut [bytes.len() as u64], 0)?;
                    group.broadcast(&mut data, 0)?;
                    continue;
                }
                let error = group.broadcast_object::<Vec<String>>(None, 0).expect_err("no object");
                let text = error.to_string();
                assert!(matches!(error, CommError::Object { what: "reading", .. }), "{text}");
                assert!(
                    text.contains(&format!("rank 0 sent {} bytes that are no object", bytes.len())),
                    "{text}"
                );
            }
            // A wrong length allocates no memory.
            if group.rank() == 0 {
                group.broadcast(&mut [1u64 << 40], 0)?;
            } else {
                let error = group.broadcast_object::<u8>(None, 0).expect_err("too long");
                assert!(error.to_string().contains("rank 0 announced 1099511627776 bytes"), "{error}");
            }
            group.barrier()
        });
    }
}

#[test]
fn the_empty_tuple_is_an_object_too() {
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
fn an_object_that_cannot_be_read_is_an_error_and_the_group_stays_usable() {
    for transport in BOTH {
        run(2, transport, |group| {
            let me = group.rank();
            match group.all_gather_object(&Moody(me)) {
                Err(error @ CommError::Object { .. }) => {
                    let text = error.to_string();
                    let start = "reading of an object failed: rank 1 sent a `it::objects::Moody`";
                    assert!(text.starts_with(start), "{text}");
                }
                other => panic!("{other:?}"),
            }
            // The control: what can be read is.
            assert_eq!(group.all_gather_object(&Moody(2 * me))?, [Moody(0), Moody(2)]);
            Ok(())
        });
    }
}

/// One rank cannot write its object: all ranks get an error at once, and none waits.
#[test]
fn an_object_that_cannot_be_written_is_an_error_on_all_and_the_group_stays_usable() {
    for transport in BOTH {
        run(3, transport, |group| {
            let (me, mine) = (group.rank(), Moody(if group.rank() == 1 { 99 } else { 0 }));
            let check = |outcome: Result<(), CommError>| {
                let error = outcome.expect_err("rank 1 wrote nothing");
                assert!(matches!(error, CommError::Object { what: "writing", .. }), "{error}");
                let part = if me == 1 { "99 cannot be written" } else { "rank 1 could not write its object" };
                assert!(error.to_string().contains(part), "{error}");
            };
            check(group.all_gather_object(&mine).map(drop));
            check(group.gather_object(&mine, 0).map(drop));
            check(group.broadcast_object((me == 1).then_some(&mine), 1).map(drop));
            let rows = [Moody(0), Moody(0), Moody(99)];
            check(group.scatter_object((me == 1).then_some(&rows[..]), 1).map(drop));
            // The control.
            assert_eq!(group.all_gather_object(&Moody(2 * me))?, [Moody(0), Moody(2), Moody(4)]);
            Ok(())
        });
    }
}

#[test]
fn a_root_without_its_objects_is_an_error() {
    run(1, Transport::Auto, |group| {
        let outcome = group.broadcast_object::<u8>(None, 0);
        assert!(outcome.unwrap_err().to_string().contains("must give the object"));
        let outcome = group.scatter_object(Some(&[1u8, 2]), 0);
        assert!(outcome.unwrap_err().to_string().contains("must give 1 objects, got 2"));
        group.barrier()
    });
}
