//! Joins the job that the environment describes, and prints who is there.
//!
//! ```text
//!  mpirun -n 4 join          srun -n 4 join          RANK=0 WORLD_SIZE=1 join
//! ```

use drumline_rendezvous::from_env;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    match join() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cannot join: {error}");
            ExitCode::FAILURE
        }
    }
}

fn join() -> Result<(), Box<dyn std::error::Error>> {
    let member = from_env()?;
    let names: Vec<String> = (0..member.world_size).map(|rank| format!("name/{rank}")).collect();
    let keys: Vec<&str> = names.iter().map(String::as_str).collect();
    let name = format!("{}:{}", member.host, std::process::id());
    member.store.set(keys[member.rank], name.as_bytes())?;
    let all = member.store.multi_get(&keys, Instant::now() + member.timeout)?;
    let all: Vec<_> = all.iter().map(|name| String::from_utf8_lossy(name)).collect();
    println!("rank {} of {}: {}", member.rank, member.world_size, all.join(" "));
    Ok(())
}
