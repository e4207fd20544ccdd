//! A server on one host, a client on another.

use rank_test::netns::Hosts;
use rank_test::sshd::{PORT, Ssh};

#[test]
fn one_host_is_reached_from_another_only_with_the_key() {
    let (Some(hosts), Some(ssh)) = (Hosts::new(2).unwrap(), Ssh::new().unwrap()) else { return };
    let server = ssh.serve(&hosts.prefix(0), hosts.address(0).into()).unwrap();
    let enter = |args: &[String]| {
        let port = format!("-p{PORT}");
        let mut command = hosts.command(1, "ssh");
        command.args(args).args([
            "-oBatchMode=yes",
            "-oConnectTimeout=5",
            &port,
            &hosts.address(0).to_string(),
        ]);
        let output = command.arg("cat /proc/sys/kernel/hostname").output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let mut args = ssh.client_args();
    assert_eq!(enter(&args), (Some(0), "host0\n".to_string()));
    args.retain(|arg| !arg.starts_with("-i"));
    args.push("-i/dev/null".to_string());
    assert_eq!(enter(&args), (Some(255), String::new()));
    drop(server);
    assert_eq!(enter(&ssh.client_args()).0, Some(255), "the server has ended");
}
