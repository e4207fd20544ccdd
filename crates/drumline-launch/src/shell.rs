//! Quotes words for a shell, whatever bytes they contain.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Returns `word` in quotes, unless every shell reads it unchanged.
///
/// ```
/// use drumline_launch::shell;
///
/// assert_eq!(shell::quoted("--lr=0.1".as_ref()), "--lr=0.1");
/// assert_eq!(shell::quoted("it's".as_ref()), r"'it'\''s'");
/// ```
pub fn quoted(word: &OsStr) -> OsString {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_=+./:,@%".contains(byte);
    let bytes = word.as_bytes();
    if !bytes.is_empty() && bytes.iter().all(plain) {
        return word.to_owned();
    }
    let mut quoted = vec![b'\''];
    for byte in bytes {
        match byte {
            b'\'' => quoted.extend(br"'\''"),
            byte => quoted.push(*byte),
        }
    }
    quoted.push(b'\'');
    OsString::from_vec(quoted)
}

/// Joins quoted words into a command line.
pub fn line<'a>(words: impl IntoIterator<Item = &'a OsStr>) -> OsString {
    words.into_iter().map(quoted).collect::<Vec<_>>().join(OsStr::new(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_shell_reads_back_the_same_words() {
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
        script.extend(line(words.iter().copied()).into_vec());
        let output = Command::new("bash").arg("-c").arg(OsStr::from_bytes(&script)).output().unwrap();
        let read: Vec<_> = output.stdout.split(|byte| *byte == 0).map(OsStr::from_bytes).collect();
        assert_eq!(read[..words.len()], words);
    }
}
