//! Words as a shell must be given them, whatever bytes they hold.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// `word` in quotes, unless it needs none.
pub(super) fn quoted(word: &OsStr) -> Vec<u8> {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_=+./:,@%".contains(byte);
    let bytes = word.as_bytes();
    if !bytes.is_empty() && bytes.iter().all(plain) {
        return bytes.to_vec();
    }
    let mut quoted = vec![b'\''];
    for byte in bytes {
        match byte {
            b'\'' => quoted.extend(br"'\''"),
            byte => quoted.push(*byte),
        }
    }
    quoted.push(b'\'');
    quoted
}

/// A command line of several words.
pub(super) fn line<'a>(words: impl IntoIterator<Item = &'a OsStr>) -> Vec<u8> {
    words.into_iter().map(quoted).collect::<Vec<_>>().join(&b' ')
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_shell_reads_back_what_was_meant() {
        let words: Vec<&OsStr> = [
            &b"plain"[..],
            b"",
            b" two words ",
            b"it's",
            b"'",
            b"$HOME `id` $(id) \\ \" * ? ~ # ! & | ; < > {a,b}",
            b"line\nbreak\ttab",
            b"-n",
            b"\xff\xfe not UTF-8",
            "Trommel\u{2014}wirbel".as_bytes(),
        ]
        .map(OsStr::from_bytes)
        .to_vec();
        let mut script = br"printf '%s\0' ".to_vec();
        script.extend(line(words.iter().copied()));
        let output = Command::new("bash").arg("-c").arg(OsStr::from_bytes(&script)).output().unwrap();
        let read: Vec<_> = output.stdout.split(|byte| *byte == 0).map(OsStr::from_bytes).collect();
        assert_eq!(read[..words.len()], words);
    }
}
