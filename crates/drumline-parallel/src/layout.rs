//! The place of each gradient in memory, and which gradients are reduced together. A pure function of what all ranks
//! know.
//!
//! ```text
//!   flat, one for each kind of element   | g7 g6 | g5 g4 g3 | g2 g1 g0 |       gradients in the order in which they become ready
//!   buckets                                  0        1          2             the first is small, so that reduction begins early
//! ```

use std::ops::Range;

use tch::Kind;

/// Gradients begin at multiples of this many bytes: a cache line.
const LINE: usize = 64;

/// What the layout needs to know about a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Item {
    pub(crate) len: usize,
    pub(crate) kind: Kind,
}

/// The sizes of buckets in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caps {
    pub(crate) first: usize,
    pub(crate) others: usize,
}

impl Caps {
    /// One bucket for each kind.
    pub(crate) const NONE: Self = Self { first: usize::MAX, others: usize::MAX };
}

/// Gradients that are reduced together.
#[derive(Debug, PartialEq)]
pub(crate) struct Bucket {
    /// The index of its flat memory.
    pub(crate) flat: usize,
    /// Its elements there.
    pub(crate) range: Range<usize>,
    /// Its parameters.
    pub(crate) params: Vec<usize>,
}

/// Flat memory for one kind of elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Flat {
    pub(crate) kind: Kind,
    pub(crate) len: usize,
}

/// The place of every gradient.
#[derive(Debug, PartialEq)]
pub(crate) struct Layout {
    pub(crate) flats: Vec<Flat>,
    /// In the order in which they are reduced.
    pub(crate) buckets: Vec<Bucket>,
    /// For each parameter its bucket.
    pub(crate) bucket_of: Vec<usize>,
    /// For each parameter the offset of its gradient in its flat memory.
    pub(crate) offset: Vec<usize>,
}

impl Layout {
    /// Lays gradients out in `order`, which contains every parameter once.
    pub(crate) fn new(items: &[Item], order: &[usize], caps: Caps) -> Self {
        let mut layout = Self {
            flats: Vec::new(),
            buckets: Vec::new(),
            bucket_of: vec![0; items.len()],
            offset: vec![0; items.len()],
        };
        // In the order of parameters, so that the flat memory stays the same when the order of gradients changes.
        for item in items {
            layout.flat_of(item.kind);
        }
        // For each flat memory the bucket for its next gradient.
        let mut open: Vec<Option<usize>> = vec![None; layout.flats.len()];
        for &param in order {
            let item = items[param];
            let flat = layout.flat_of(item.kind);
            let bucket = *open[flat].get_or_insert_with(|| layout.new_bucket(flat));
            layout.put(param, item, bucket);
            let cap = if bucket == 0 { caps.first } else { caps.others };
            if layout.buckets[bucket].range.len() * item.kind.elt_size_in_bytes() >= cap {
                open[flat] = None;
            }
        }
        layout
    }

    fn flat_of(&mut self, kind: Kind) -> usize {
        self.flats.iter().position(|flat| flat.kind == kind).unwrap_or_else(|| {
            self.flats.push(Flat { kind, len: 0 });
            self.flats.len() - 1
        })
    }

    fn new_bucket(&mut self, flat: usize) -> usize {
        let start = self.flats[flat].len;
        self.buckets.push(Bucket { flat, range: start..start, params: Vec::new() });
        self.buckets.len() - 1
    }

    fn put(&mut self, param: usize, item: Item, bucket: usize) {
        let place = &mut self.buckets[bucket];
        let flat = &mut self.flats[place.flat];
        (self.bucket_of[param], self.offset[param]) = (bucket, flat.len);
        flat.len += item.len.next_multiple_of(LINE / item.kind.elt_size_in_bytes());
        place.range.end = flat.len;
        place.params.push(param);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPS: Caps = Caps { first: 256, others: 1024 };

    fn floats(lens: &[usize]) -> Vec<Item> {
        lens.iter().map(|&len| Item { len, kind: Kind::Float }).collect()
    }

    #[test]
    fn the_first_bucket_is_small_and_gradients_begin_at_cache_lines() {
        let items = floats(&[1, 64, 100, 200, 300]);
        let layout = Layout::new(&items, &[4, 3, 2, 1, 0], CAPS);
        let buckets: Vec<_> = layout.buckets.iter().map(|b| b.params.clone()).collect();
        assert_eq!(buckets, [vec![4], vec![3, 2], vec![1, 0]]);
        assert_eq!(layout.offset, [304 + 208 + 112 + 64, 304 + 208 + 112, 304 + 208, 304, 0]);
        assert_eq!(layout.flats, [Flat { kind: Kind::Float, len: 304 + 208 + 112 + 64 + 16 }]);
        assert_eq!(layout.buckets[1].range, 304..304 + 208 + 112);
    }

    #[test]
    fn kinds_do_not_share_a_bucket() {
        let items = [
            Item { len: 4, kind: Kind::Float },
            Item { len: 4, kind: Kind::Half },
            Item { len: 4, kind: Kind::Float },
        ];
        let layout = Layout::new(&items, &[2, 1, 0], CAPS);
        let buckets: Vec<_> = layout.buckets.iter().map(|b| (b.flat, b.params.clone())).collect();
        assert_eq!(buckets, [(0, vec![2, 0]), (1, vec![1])]);
        assert_eq!(layout.flats.len(), 2);
        let other_order = Layout::new(&items, &[1, 2, 0], CAPS);
        assert_eq!(other_order.flats, layout.flats, "the flat memory stays the same");
    }

    #[test]
    fn nothing_and_parameters_without_elements() {
        assert_eq!(Layout::new(&[], &[], CAPS).buckets, []);
        let layout = Layout::new(&floats(&[0, 0]), &[1, 0], CAPS);
        assert_eq!(layout.buckets.len(), 1);
        assert_eq!(layout.flats[0].len, 0);
    }
}
