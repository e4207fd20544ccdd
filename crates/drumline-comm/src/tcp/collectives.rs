//! Collectives over links, among a **team**: some ranks of the group, in an order all of them know.
//!
//! Every rank has a link to every other, so a part goes straight to its owner: an all-reduce moves `2 (n-1)/n` of the data
//! out of each rank, in two steps however many ranks there are, and its owner reduces a part in team order, so all
//! ranks hold the same bits. What arrives is reduced in small windows while it is still in the cache.

use std::ops::Range;

use super::mesh::{BURST, Mesh, Piece};
use crate::element::Element;
use crate::reduce::{Order, ReduceOp, reduce_into, reduce_with};
use crate::select::{LinkReduce, link_reduce};
use crate::shm::{Context, Stop, bytes};
use crate::slices::{chunks, offsets, part};

/// A collective over links: who takes part, and the number of its next step.
pub(crate) struct Team<'t> {
    pub(crate) mesh: &'t mut Mesh,
    /// Ranks of the group.
    pub(crate) ranks: &'t [usize],
    step: u32,
}

impl<'t> Team<'t> {
    pub(crate) fn new(mesh: &'t mut Mesh, ranks: &'t [usize]) -> Self {
        Self { mesh, ranks, step: 0 }
    }

    /// This rank's place in the team.
    fn me(&self) -> usize {
        let me = self.mesh.me();
        self.ranks.iter().position(|&rank| rank == me).expect("a rank drives only teams it belongs to")
    }

    fn len(&self) -> usize {
        self.ranks.len()
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me();
        (0..self.len()).filter(move |&place| place != me)
    }

    /// One step: `give(p)` goes to the team's `p`-th rank, what comes from it fills `take(p)`.
    fn exchange<'d>(
        &mut self,
        cx: &Context<'_>,
        give: impl IntoIterator<Item = (usize, &'d [u8])>,
        take: Vec<(usize, &mut [u8])>,
    ) -> Result<(), Stop> {
        let ranks = self.ranks;
        let sends = give.into_iter().map(|(place, data)| (ranks[place], data));
        let mut drive = self.mesh.drive(cx, self.step, sends)?;
        self.step += 1;
        let mut pieces: Vec<Piece<'_>> = take
            .into_iter()
            .map(|(place, into)| Piece { peer: ranks[place], total: into.len(), into })
            .collect();
        drive.receive(&mut pieces)?;
        drive.finish()
    }

    /// Nobody returns before all have called.
    pub(crate) fn barrier(&mut self, cx: &Context<'_>) -> Result<(), Stop> {
        let (me, n) = (self.me(), self.len());
        let mut distance = 1;
        while distance < n {
            let (to, from) = ((me + distance) % n, (me + n - distance) % n);
            self.exchange(cx, [(to, &[][..])], vec![(from, &mut [])])?;
            distance *= 2;
        }
        Ok(())
    }

    pub(crate) fn all_reduce<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Stop> {
        match link_reduce(size_of_val(data), self.len()) {
            LinkReduce::Alone => Ok(()),
            LinkReduce::Everything => self.reduce_everything(cx, data, op),
            LinkReduce::Parts => {
                let parts = self.parts(data);
                self.reduce_my_part(cx, data, &parts, op)?;
                self.share_parts(cx, data, &parts)
            }
        }
    }

    fn parts<T>(&self, data: &[T]) -> Vec<Range<usize>> {
        (0..self.len()).map(|place| part(data.len(), self.len(), place, size_of::<T>())).collect()
    }

    /// Everyone sends everything to everyone and reduces it all: one step, for small data.
    fn reduce_everything<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let mut all = vec![T::zeroed(); data.len() * self.len()];
        self.gather_all(cx, data, &mut all, &vec![data.len(); self.len()])?;
        if !data.is_empty() {
            let inputs: Vec<&[T]> = all.chunks(data.len()).collect();
            reduce_into(data, &inputs, op);
        }
        Ok(())
    }

    /// First half: each rank ends with the reduction of its own part, in place.
    fn reduce_my_part<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        parts: &[Range<usize>],
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let me = self.me();
        let mut gives = Vec::new();
        let mut mine: &mut [T] = &mut [];
        for (place, cell) in cells(data, &lengths(parts)).into_iter().enumerate() {
            if place == me {
                mine = cell;
            } else {
                gives.push((place, &*cell));
            }
        }
        self.reduce_in_place(cx, mine, gives, op)
    }

    /// Second half: each rank's part is copied to all.
    fn share_parts<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        parts: &[Range<usize>],
    ) -> Result<(), Stop> {
        let me = self.me();
        let mut others = Vec::new();
        let mut own: &[T] = &[];
        for (place, cell) in cells(data, &lengths(parts)).into_iter().enumerate() {
            if place == me {
                own = cell;
            } else {
                others.push((place, bytes::of_mut(cell)));
            }
        }
        self.exchange(cx, self.peers().map(|place| (place, bytes::of(own))).collect::<Vec<_>>(), others)
    }

    /// Gives each peer what is meant for it; `mine` becomes its reduction with what comes from all of them, in team order.
    fn reduce_in_place<T: Element>(
        &mut self,
        cx: &Context<'_>,
        mine: &mut [T],
        gives: Vec<(usize, &[T])>,
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let (me, ranks) = (self.me(), self.ranks);
        let mut scratch = self.mesh.take_scratch();
        let sends = gives.into_iter().map(|(place, data)| (ranks[place], bytes::of(data)));
        let mut drive = self.mesh.drive(cx, self.step, sends)?;
        self.step += 1;
        let total = size_of_val(mine);
        let window = total.next_multiple_of(8).clamp(8, BURST);
        scratch.resize(window * ranks.len() / 8, 0);
        for range in chunks(mine.len(), window / size_of::<T>()) {
            let mine = &mut mine[range];
            let mut pieces = Vec::with_capacity(ranks.len());
            for (place, row) in bytemuck::cast_slice_mut(&mut scratch).chunks_mut(window).enumerate() {
                let into = &mut row[..size_of_val(mine)];
                if place != me {
                    pieces.push(Piece { peer: ranks[place], total, into });
                } else if ranks.len() != 2 {
                    into.copy_from_slice(bytes::of(mine));
                }
            }
            drive.receive(&mut pieces)?;
            let row = |place: usize| bytes::view::<T>(&scratch[place * window / 8..], mine.len());
            match (me, ranks.len()) {
                (0, 2) => reduce_with(mine, row(1), Order::MineFirst, op),
                (1, 2) => reduce_with(mine, row(0), Order::TheirsFirst, op),
                _ => reduce_into(mine, &(0..ranks.len()).map(row).collect::<Vec<_>>(), op),
            }
        }
        drive.finish()?;
        self.mesh.keep_scratch(scratch);
        Ok(())
    }

    /// Everybody's `input` laid end to end in everybody's `output`.
    pub(crate) fn gather_all<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
    ) -> Result<(), Stop> {
        let me = self.me();
        let mut take = Vec::new();
        for (place, cell) in cells(output, counts).into_iter().enumerate() {
            if place == me {
                cell.copy_from_slice(input);
            } else {
                take.push((place, bytes::of_mut(cell)));
            }
        }
        let give: Vec<_> = self.peers().map(|place| (place, bytes::of(input))).collect();
        self.exchange(cx, give, take)
    }

    /// Everybody's `input` laid end to end in the root's `output`.
    pub(crate) fn gather<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: &[T],
        output: Option<&mut [T]>,
        counts: &[usize],
        root: usize,
    ) -> Result<(), Stop> {
        let me = self.me();
        let Some(output) = output.filter(|_| me == root) else {
            return self.exchange(cx, [(root, bytes::of(input))], Vec::new());
        };
        let mut take = Vec::new();
        for (place, cell) in cells(output, counts).into_iter().enumerate() {
            if place == me {
                cell.copy_from_slice(input);
            } else {
                take.push((place, bytes::of_mut(cell)));
            }
        }
        self.exchange(cx, [], take)
    }

    /// Cell `p` of the root's `input` becomes rank `p`'s `output`.
    pub(crate) fn scatter<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: Option<&[T]>,
        output: &mut [T],
        root: usize,
    ) -> Result<(), Stop> {
        let (me, count) = (self.me(), output.len());
        let Some(input) = input.filter(|_| me == root) else {
            return self.exchange(cx, [], vec![(root, bytes::of_mut(output))]);
        };
        output.copy_from_slice(&input[me * count..][..count]);
        let give: Vec<_> =
            self.peers().map(|place| (place, bytes::of(&input[place * count..][..count]))).collect();
        self.exchange(cx, give, Vec::new())
    }

    /// The root's `data` is copied to all: straight, or if it is large and goes to several, in parts that all pass on.
    pub(crate) fn broadcast<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        root: usize,
    ) -> Result<(), Stop> {
        let me = self.me();
        if link_reduce(size_of_val(data), self.len()) != LinkReduce::Parts || self.len() == 2 {
            return if me == root {
                let give: Vec<_> = self.peers().map(|place| (place, bytes::of(data))).collect();
                self.exchange(cx, give, Vec::new())
            } else {
                self.exchange(cx, [], vec![(root, bytes::of_mut(data))])
            };
        }
        let parts = self.parts(data);
        if me == root {
            let give: Vec<_> =
                self.peers().map(|place| (place, bytes::of(&data[parts[place].clone()]))).collect();
            self.exchange(cx, give, Vec::new())?;
        } else {
            self.exchange(cx, [], vec![(root, bytes::of_mut(&mut data[parts[me].clone()]))])?;
        }
        self.share_parts(cx, data, &parts)
    }

    /// The root's `data` becomes the reduction; the others' is unchanged.
    pub(crate) fn reduce<T: Element>(
        &mut self,
        cx: &Context<'_>,
        data: &mut [T],
        op: ReduceOp,
        root: usize,
    ) -> Result<(), Stop> {
        let counts = lengths(&self.parts(data));
        let mut reduced = vec![T::zeroed(); counts[self.me()]];
        self.reduce_scatter(cx, data, &mut reduced, &counts, op)?;
        self.gather(cx, &reduced, Some(data), &counts, root)
    }

    pub(crate) fn reduce_scatter<T: Element>(
        &mut self,
        cx: &Context<'_>,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<(), Stop> {
        let starts = offsets(counts);
        let cell = |place: usize| &input[starts[place]..][..counts[place]];
        output.copy_from_slice(cell(self.me()));
        let gives = self.peers().map(|place| (place, cell(place))).collect();
        self.reduce_in_place(cx, output, gives, op)
    }

    pub(crate) fn all_to_all<T: Element>(
        &mut self,
        cx: &Context<'_>,
        (input, sends): (&[T], &[usize]),
        (output, receives): (&mut [T], &[usize]),
    ) -> Result<(), Stop> {
        let (me, from) = (self.me(), offsets(sends));
        let mut take = Vec::new();
        for (place, cell) in cells(output, receives).into_iter().enumerate() {
            if place == me {
                cell.copy_from_slice(&input[from[me]..][..sends[me]]);
            } else {
                take.push((place, bytes::of_mut(cell)));
            }
        }
        let give: Vec<_> =
            self.peers().map(|place| (place, bytes::of(&input[from[place]..][..sends[place]]))).collect();
        self.exchange(cx, give, take)
    }
}

fn lengths(parts: &[Range<usize>]) -> Vec<usize> {
    parts.iter().map(Range::len).collect()
}

/// `slice` cut into consecutive cells of these lengths.
fn cells<'s, T>(mut slice: &'s mut [T], counts: &[usize]) -> Vec<&'s mut [T]> {
    let mut cells = Vec::with_capacity(counts.len());
    for &count in counts {
        let (cell, rest) = slice.split_at_mut(count);
        cells.push(cell);
        slice = rest;
    }
    cells
}
