//! The handshake with anybody at the other end: any bytes to either side, and an honest exchange with bytes changed on
//! the way. Nobody without the key is ever believed, whatever is said.
#![no_main]

use drumline_rendezvous::JobKey;
use drumline_rendezvous::handshake::{
    ClientHandshake, ClientStep, Hello, Prover, Role, ServerHandshake, ServerStep,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((mode, rest)) = bytes.split_first() else { return };
    let prover = Prover::from(&JobKey::from_bytes([7; 32]));
    match mode % 4 {
        0 => stranger_to_server(&prover, rest),
        1 => stranger_to_client(&prover, rest),
        2 => drop(Hello::decode(rest)),
        _ => changed_on_the_way(&prover, rest),
    }
});

fn stranger_to_server(prover: &Prover, mut bytes: &[u8]) {
    let mut server = ServerHandshake::new();
    while let Some((message, rest)) = bytes.split_at_checked(server.want()) {
        match server.receive(prover, message) {
            Ok(ServerStep::Send(_)) => bytes = rest,
            Ok(step) => panic!("believed a stranger: {step:?}"),
            Err(_) => return,
        }
    }
}

fn stranger_to_client(prover: &Prover, mut bytes: &[u8]) {
    let mut client = ClientHandshake::new(prover, &hello()).unwrap();
    while let Some((message, rest)) = bytes.split_at_checked(client.want()) {
        match client.receive(message) {
            Ok(step) => panic!("believed a stranger: {step:?}"),
            Err(_) => bytes = rest,
        }
    }
}

/// Each byte of input changes the byte at its place in one of the messages; all zero: nothing is changed.
fn changed_on_the_way(prover: &Prover, changes: &[u8]) {
    let mut changes = changes.iter().copied();
    let mut altered = false;
    let mut pass = |message: &[u8]| -> Vec<u8> {
        message
            .iter()
            .map(|byte| {
                let change = changes.next().unwrap_or(0);
                altered |= change != 0;
                byte ^ change
            })
            .collect()
    };
    let mut client = ClientHandshake::new(prover, &hello()).unwrap();
    let mut server = ServerHandshake::new();
    let opening = pass(client.opening());
    let Ok(ServerStep::Send(answer)) = server.receive(prover, &opening) else { return assert!(altered) };
    let answer = pass(&answer);
    let Ok(ClientStep::Send(proof)) = client.receive(&answer) else { return assert!(altered) };
    let proof = pass(&proof[..]);
    match server.receive(prover, &proof) {
        Ok(ServerStep::Proved(said, _)) => assert!(!altered && said == hello()),
        _ => assert!(altered),
    }
}

fn hello() -> Hello {
    let mut hello = Hello::new(Role::Link).member(3, 8).round(2).note(b"group 7");
    (hello.host, hello.pid) = ("n1".into(), 77);
    hello
}
