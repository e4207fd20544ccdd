//! The results as a table: a row for each size, with a bar for the bandwidth.

use std::io::{self, Write};

use super::binding::Binding;
use super::row::Row;
use super::sizes::ByteSize;

const BAR_CELLS: usize = 24;
/// 1 MB/s.
const BAR_BEGINS_AT: f64 = 1e-3;
const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];

/// What is the same for all rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Header {
    /// Cores that rank 0 may use.
    pub(super) usable: usize,
    /// Cores of its machine.
    pub(super) machine: usize,
    pub(super) binding: Binding,
    pub(super) cold: bool,
}

/// The rows of one operation, each printed as soon as it is known.
pub(super) struct Table<W> {
    out: W,
    header: Header,
    begun: bool,
}

impl<W: Write> Table<W> {
    pub(super) fn new(out: W, header: Header) -> Self {
        Self { out, header, begun: false }
    }

    /// Prints a row, and the title before the first one.
    pub(super) fn print(&mut self, row: &Row) -> io::Result<()> {
        if !self.begun {
            writeln!(self.out, "{}\n\n{}", title(&self.header, row), column_names(row))?;
            self.begun = true;
        }
        writeln!(self.out, "{}", line(row))?;
        self.out.flush()
    }
}

fn column_names(row: &Row) -> String {
    match row.bytes {
        0 => format!("{:>12}{:>12}", "median", "p99"),
        _ => format!(
            "{:>10}{:>12}{:>12}{:>12}{:>12}  one cell more is twice the busbw",
            "size", "median", "p99", "algbw", "busbw"
        ),
    }
}

fn line(row: &Row) -> String {
    let (median, p99) = (time(row.median_us), time(row.p99_us));
    if row.bytes == 0 {
        return format!("{median:>12}{p99:>12}");
    }
    let (size, algbw) = (ByteSize(row.bytes).to_string(), rate(row.algbw_gbps));
    // A single rank moves no data.
    let (busbw, bar) = if row.world == 1 {
        ("–".into(), String::new())
    } else {
        (rate(row.busbw_gbps), bar(row.busbw_gbps))
    };
    let line = format!("{size:>10}{median:>12}{p99:>12}{algbw:>12}{busbw:>12}  {bar}");
    line.trim_end().to_owned()
}

fn title(header: &Header, row: &Row) -> String {
    let ranks = counted(row.world, "rank");
    let what = match row.bytes {
        0 => format!("{}, {ranks}", row.op),
        _ if header.cold => format!("{} of {}, {ranks}; {} memory, cold", row.op, row.dtype, row.memory),
        _ => format!("{} of {}, {ranks}; {} memory, hot", row.op, row.dtype, row.memory),
    };
    let checks = if cfg!(feature = "unchecked") { "; checks compiled out" } else { "" };
    format!("{what}; transport {}; {}{checks}", row.transport, places(header))
}

/// Where the ranks run.
fn places(header: &Header) -> String {
    let machine = counted(header.machine, "core");
    let cores =
        if header.usable < header.machine { format!("{} of {machine}", header.usable) } else { machine };
    match header.binding {
        Binding::OwnCore => format!("{cores} usable, each rank bound to one"),
        Binding::Launcher => format!("bound by the launcher, rank 0 to {cores}"),
        Binding::Free => format!("{cores} usable"),
    }
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// A time with three significant digits, in a suitable unit.
fn time(micros: f64) -> String {
    match micros {
        us if us < 1e3 => format!("{} µs", digits(us)),
        us if us < 1e6 => format!("{} ms", digits(us * 1e-3)),
        us => format!("{} s", digits(us * 1e-6)),
    }
}

fn rate(gbps: f64) -> String {
    if gbps < 0.1 { format!("{} MB/s", digits(gbps * 1e3)) } else { format!("{} GB/s", digits(gbps)) }
}

fn digits(value: f64) -> String {
    let decimals = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.decimals$}")
}

/// A bar that grows by one cell when the rate doubles, in eighths of a cell. So it does not depend on the other rows.
fn bar(gbps: f64) -> String {
    let cells = (gbps / BAR_BEGINS_AT).log2().clamp(0.0, BAR_CELLS as f64);
    let eighths = (8.0 * cells).round() as usize;
    let mut bar = "█".repeat(eighths / 8);
    if !eighths.is_multiple_of(8) {
        bar.push(EIGHTHS[eighths % 8]);
    }
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_grow_by_a_cell_when_the_rate_doubles() {
        assert_eq!([0.002, 0.004, 1.024].map(bar), ["█".to_owned(), "██".to_owned(), "█".repeat(10)]);
        assert_eq!(bar(0.003), "█▋");
        assert_eq!([0.0, 0.0005, 0.001].map(bar), ["", "", ""]);
        assert_eq!(bar(1e9), "█".repeat(BAR_CELLS));
    }

    #[test]
    fn numbers_keep_three_digits() {
        assert_eq!(
            [0.254, 12.34, 999.4, 1500.0, 2.5e6].map(time),
            ["0.25 µs", "12.3 µs", "999 µs", "1.50 ms", "2.50 s"]
        );
        assert_eq!([0.0641, 19.24].map(rate), ["64.1 MB/s", "19.2 GB/s"]);
    }

    fn row(world: usize, bytes: usize) -> Row {
        Row {
            op: "all-reduce".into(),
            world,
            bytes,
            dtype: "f32",
            memory: "heap",
            backend: "drumline",
            transport: "shm",
            median_us: 1.0,
            p99_us: 2.0,
            algbw_gbps: 1.0,
            busbw_gbps: 1.0,
        }
    }

    const HEADER: Header = Header { usable: 2, machine: 2, binding: Binding::OwnCore, cold: false };

    #[test]
    fn a_table_has_a_title_and_a_row_per_size() {
        let mut text = Vec::new();
        let mut table = Table::new(&mut text, HEADER);
        [4096, 1 << 20].into_iter().for_each(|bytes| table.print(&row(2, bytes)).unwrap());
        let text = String::from_utf8(text).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines[0],
            "all-reduce of f32, 2 ranks; heap memory, hot; transport shm; 2 cores usable, each rank bound to one"
        );
        assert!(lines[3].trim_start().starts_with("4 KiB") && lines[3].ends_with(&bar(1.0)), "{text}");
        assert!(lines.len() == 5 && lines[4].trim_start().starts_with("1 MiB"), "{text}");
    }

    #[test]
    fn a_single_rank_has_no_bus() {
        assert!(line(&row(1, 16)).ends_with("1.00 GB/s           –"), "{}", line(&row(1, 16)));
    }

    #[test]
    fn the_title_shows_who_bound_the_ranks() {
        let of = |usable, binding| places(&Header { usable, machine: 8, binding, cold: false });
        assert_eq!(of(8, Binding::Free), "8 cores usable");
        assert_eq!(of(2, Binding::Free), "2 of 8 cores usable");
        assert_eq!(of(1, Binding::Launcher), "bound by the launcher, rank 0 to 1 of 8 cores");
    }
}
