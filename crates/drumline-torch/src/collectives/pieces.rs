//! A collective in pieces, so that copies and the collective itself overlap.
//!
//! ```text
//!   piece        0     1     2     3     4         a *slot* is host memory for one piece; piece p has slot p mod 3
//!   down        ▕0▏▕1▏▕2▏      ▕3▏   ▕4▏           from the GPU into the slot
//!   collective     ▕ 0 ▏▕ 1 ▏▕ 2 ▏▕ 3 ▏▕ 4 ▏       of all ranks' slots
//!   up                  ▕0▏  ▕1▏  ▕2▏  ▕3▏  ▕4▏    back to the GPU; then the slot is free for the next piece
//! ```
//! Not here: the copies themselves (`staged`).

use std::ops::Range;

use crate::error::TorchError;

type Result<T = ()> = std::result::Result<T, TorchError>;

/// Three pieces can be copied down, reduced and copied up at the same time.
pub(super) const SLOTS: usize = 3;

/// Bytes that are copied and reduced together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) slot: usize,
    pub(super) bytes: Range<usize>,
}

/// Moves pieces. Copies may be asynchronous; `arrived` waits for the copy down.
pub(super) trait Mover {
    /// Starts the copy into the slot, after the slot's last copy up.
    fn down(&mut self, piece: &Piece) -> Result;

    /// Waits until the piece is in its slot.
    fn arrived(&mut self, piece: &Piece) -> Result;

    /// Runs the collective on the contents of the slot.
    #[track_caller]
    fn act(&mut self, piece: &Piece) -> Result;

    /// Starts the copy back.
    fn up(&mut self, piece: &Piece) -> Result;
}

/// Moves `len` bytes in pieces of at most `most`.
#[track_caller]
pub(super) fn move_all(len: usize, most: usize, mover: &mut impl Mover) -> Result {
    let pieces = cut(len, most);
    let mut coming = pieces.iter();
    for piece in coming.by_ref().take(SLOTS) {
        mover.down(piece)?;
    }
    for piece in &pieces {
        mover.arrived(piece)?;
        mover.act(piece)?;
        mover.up(piece)?;
        if let Some(next) = coming.next() {
            mover.down(next)?;
        }
    }
    Ok(())
}

/// An empty tensor has one piece as well: ranks must agree that it is empty.
fn cut(len: usize, most: usize) -> Vec<Piece> {
    let count = len.div_ceil(most).max(1);
    let piece =
        |number: usize| Piece { slot: number % SLOTS, bytes: number * most..len.min((number + 1) * most) };
    (0..count).map(piece).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies synchronously, and logs each operation.
    struct Copier {
        data: Vec<u8>,
        slots: [Option<Vec<u8>>; SLOTS],
        log: String,
    }

    impl Mover for Copier {
        fn down(&mut self, piece: &Piece) -> Result {
            assert!(self.slots[piece.slot].is_none(), "the slot is still in use");
            self.slots[piece.slot] = Some(self.data[piece.bytes.clone()].to_vec());
            self.log.push('v');
            Ok(())
        }

        fn arrived(&mut self, piece: &Piece) -> Result {
            assert_eq!(self.slots[piece.slot].as_ref().map(Vec::len), Some(piece.bytes.len()));
            Ok(())
        }

        fn act(&mut self, piece: &Piece) -> Result {
            self.slots[piece.slot].iter_mut().flatten().for_each(|byte| *byte += 1);
            self.log.push('*');
            Ok(())
        }

        fn up(&mut self, piece: &Piece) -> Result {
            let slot = self.slots[piece.slot].take().expect("acted on");
            self.data[piece.bytes.clone()].copy_from_slice(&slot);
            self.log.push('^');
            Ok(())
        }
    }

    #[test]
    fn every_byte_is_reduced_once_at_any_length() {
        for len in [0, 1, 7, 8, 9, 24, 25, 100] {
            let mut copier = Copier { data: vec![5; len], slots: Default::default(), log: String::new() };
            move_all(len, 8, &mut copier).unwrap();
            assert_eq!(copier.data, vec![6; len], "{len} bytes");
        }
    }

    #[test]
    fn the_next_pieces_are_copied_while_one_is_reduced() {
        let mut copier = Copier { data: vec![0; 40], slots: Default::default(), log: String::new() };
        move_all(40, 8, &mut copier).unwrap();
        assert_eq!(copier.log, "vvv*^v*^v*^*^*^");
    }

    #[test]
    fn an_error_ends_it() {
        struct Failing(usize);
        impl Mover for Failing {
            fn down(&mut self, _: &Piece) -> Result {
                Ok(())
            }
            fn arrived(&mut self, _: &Piece) -> Result {
                Ok(())
            }
            fn act(&mut self, _: &Piece) -> Result {
                self.0 += 1;
                Err(TorchError::Internal { what: "lost" })
            }
            fn up(&mut self, _: &Piece) -> Result {
                Ok(())
            }
        }
        let mut failing = Failing(0);
        assert!(move_all(40, 8, &mut failing).is_err());
        assert_eq!(failing.0, 1);
    }
}
