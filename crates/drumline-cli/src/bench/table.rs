//! The results for people: sizes in rows, a bar for the bandwidth.

use std::io::{self, Write};

use super::row::Row;
use super::sizes::ByteSize;

const BAR_CELLS: usize = 24;
const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];

/// What holds for the whole table and is not in its rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Header {
    pub(super) cores: usize,
    pub(super) bound: bool,
    pub(super) cold: bool,
}

/// Prints the rows of one operation.
pub(super) fn print_table(out: &mut impl Write, header: &Header, rows: &[Row]) -> io::Result<()> {
    let Some(first) = rows.first() else { return Ok(()) };
    writeln!(out, "{}", title(header, first))?;
    if first.bytes == 0 && rows.len() == 1 {
        writeln!(out, "\n{:>12}{:>12}", "median", "p99")?;
        return writeln!(out, "{:>12}{:>12}", time(first.median_us), time(first.p99_us));
    }
    writeln!(out, "\n{:>10}{:>12}{:>12}{:>12}{:>12}", "size", "median", "p99", "algbw", "busbw")?;
    let most = rows.iter().map(|row| row.busbw_gbps).fold(0.0, f64::max);
    for row in rows {
        let (size, bar) = (ByteSize(row.bytes).to_string(), bar(row.busbw_gbps, most));
        let (median, p99) = (time(row.median_us), time(row.p99_us));
        let line = format!(
            "{size:>10}{median:>12}{p99:>12}{:>12}{:>12}  {bar}",
            rate(row.algbw_gbps),
            rate(row.busbw_gbps)
        );
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

fn title(header: &Header, row: &Row) -> String {
    let ranks = counted(row.world, "rank");
    let what = match row.bytes {
        0 => format!("{}, {ranks}", row.op),
        _ if header.cold => format!("{} of {}, {ranks}; {} memory, cold", row.op, row.dtype, row.memory),
        _ => format!("{} of {}, {ranks}; {} memory, hot", row.op, row.dtype, row.memory),
    };
    let binding = if header.bound { ", each rank bound to one" } else { "" };
    let checks = if cfg!(feature = "unchecked") { "; checks compiled out" } else { "" };
    format!("{what}; transport {}; {} usable{binding}{checks}", row.transport, counted(header.cores, "core"))
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Three digits that count, in the unit that suits.
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

/// A bar as long as `value` is of `most`, to an eighth of a cell.
fn bar(value: f64, most: f64) -> String {
    let share = if most > 0.0 { (value / most).clamp(0.0, 1.0) } else { 0.0 };
    let eighths = (share * (8 * BAR_CELLS) as f64).round() as usize;
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
    fn bars_are_as_long_as_their_share() {
        assert_eq!(bar(8.0, 8.0), "█".repeat(BAR_CELLS));
        assert_eq!(bar(4.0, 8.0), "█".repeat(BAR_CELLS / 2));
        assert_eq!(bar(1.0, 64.0), "▍");
        assert_eq!(bar(0.0, 8.0), "");
        assert_eq!(bar(0.0, 0.0), "");
    }

    #[test]
    fn numbers_keep_three_digits() {
        assert_eq!(
            [0.254, 12.34, 999.4, 1500.0, 2.5e6].map(time),
            ["0.25 µs", "12.3 µs", "999 µs", "1.50 ms", "2.50 s"]
        );
        assert_eq!([0.0641, 19.24].map(rate), ["64.1 MB/s", "19.2 GB/s"]);
    }

    #[test]
    fn a_table_has_a_title_and_a_row_per_size() {
        let row = |bytes, busbw_gbps| Row {
            op: "all-reduce".into(),
            world: 2,
            bytes,
            dtype: "f32",
            memory: "heap",
            backend: "drumline",
            transport: "shm",
            median_us: 1.0,
            p99_us: 2.0,
            algbw_gbps: 1.0,
            busbw_gbps,
        };
        let mut text = Vec::new();
        let header = Header { cores: 2, bound: true, cold: false };
        print_table(&mut text, &header, &[row(4096, 1.0), row(1 << 20, 2.0)]).unwrap();
        let text = String::from_utf8(text).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines[0],
            "all-reduce of f32, 2 ranks; heap memory, hot; transport shm; 2 cores usable, each rank bound to one"
        );
        assert!(
            lines[3].trim_start().starts_with("4 KiB") && lines[4].ends_with(&"█".repeat(BAR_CELLS)),
            "{text}"
        );
    }
}
