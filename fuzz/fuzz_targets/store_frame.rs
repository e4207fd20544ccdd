//! Any bytes as what a client sends: split, read, carried out, answered; and as what a server sends.
#![no_main]

use drumline_rendezvous::Reply;
use drumline_rendezvous::core::Core;
use drumline_rendezvous::frame::{Call, Frame, encode_call, encode_reply};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut core = Core::new();
    let (mut asked, mut answered) = (0, 0);
    let mut rest = bytes;
    while let Ok(Some(frame)) = Frame::split(&mut rest) {
        if let Ok(reply) = frame.reply() {
            check_reply(frame.seq, &reply);
        }
        let Ok(call) = frame.call() else { continue };
        let mut again = Vec::new();
        encode_call(frame.seq, &call, &mut again);
        let read_again = Frame::split(&mut again.as_slice()).unwrap().unwrap();
        assert_eq!(read_again.call().unwrap(), call);
        let mut replies = Vec::new();
        match call {
            Call::Request(request) => {
                asked += 1;
                core.apply((asked, frame.seq), request, &mut replies);
            }
            Call::Cancel(target) => answered += usize::from(core.cancel((asked, target))),
            Call::Bye => {}
        }
        answered += replies.len();
        for ((_, seq), reply) in replies {
            check_reply(seq, &reply);
        }
    }
    // Exactly one answer each.
    assert_eq!(asked, answered + core.num_waiters());
});

fn check_reply(seq: u64, reply: &Reply) {
    let mut bytes = Vec::new();
    encode_reply(seq, reply, &mut bytes);
    let frame = Frame::split(&mut bytes.as_slice()).unwrap().unwrap();
    assert_eq!((frame.seq, &frame.reply().unwrap()), (seq, reply));
}
