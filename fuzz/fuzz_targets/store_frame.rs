//! Any bytes as messages (a length of 4 bytes before each): read, sealed and opened, carried out, answered; and any bytes
//! as frames of somebody who does not have the key, which are never believed.
#![no_main]

use drumline_rendezvous::Reply;
use drumline_rendezvous::core::Core;
use drumline_rendezvous::frame::{Call, Frame, Opener, Sealer, encode_call, encode_reply};
use libfuzzer_sys::fuzz_target;

const KEY: [u8; 32] = [7; 32];

fuzz_target!(|bytes: &[u8]| {
    assert!(!matches!(Opener::new(&KEY).open(bytes), Ok(Some(_))), "believed a stranger");
    let mut core = Core::new();
    let (mut sealer, mut opener) = (Sealer::new(&KEY), Opener::new(&KEY));
    let (mut asked, mut answered) = (0, 0);
    let mut rest = bytes;
    while let Some(message) = split(&mut rest) {
        let Ok(frame) = Frame::read(message) else { continue };
        if let Ok(reply) = frame.reply() {
            check_reply(frame.id, &reply);
        }
        let Ok((oldest, call)) = frame.call() else { continue };
        let mut sealed = Vec::new();
        sealer.seal(&mut sealed, |out| encode_call(frame.id, oldest, &call, out));
        let (opened, used) = opener.open(&sealed).unwrap().unwrap();
        assert_eq!(used, sealed.len());
        assert_eq!(Frame::read(opened).unwrap().call().unwrap(), (oldest, call.clone()));
        let mut replies = Vec::new();
        match call {
            Call::Request(request) => {
                asked += 1;
                core.apply((asked, frame.id), request, &mut replies);
            }
            Call::Cancel(target) => answered += usize::from(core.cancel((asked, target))),
            Call::Bye | Call::Ping => {}
        }
        answered += replies.len();
        for ((_, id), reply) in replies {
            check_reply(id, &reply);
        }
    }
    // Exactly one answer each.
    assert_eq!(asked, answered + core.num_waiters());
});

fn split<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (message, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    *bytes = rest;
    Some(message)
}

fn check_reply(id: u64, reply: &Reply) {
    let mut bytes = Vec::new();
    encode_reply(id, reply, &mut bytes);
    let frame = Frame::read(&bytes).unwrap();
    assert_eq!((frame.id, &frame.reply().unwrap()), (id, reply));
}
