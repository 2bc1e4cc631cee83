//! The sample application: a small server of HTTP/1.1 and of HTTP/2 by prior knowledge, which starts in under a
//! millisecond.
//!
//! It responds with `Hello from POD` and the address of its peer. It counts its own requests, so that tests can compare
//! the kernel's count with the application's. It misbehaves on request:
//!
//! | place | behaviour |
//! |---|---|
//! | query of any path | see [`requested_response::RequestedResponse`] |
//! | `/counts`, `/headers`, `/env`, `/echo`, `/protocol`, `/files/NAME`, `/upgrade`, `/ready` | see [`respond::respond`] |
//! | environment | see [`config::HelloConfig`] |
//!
//! On a port of its own it speaks a protocol that is not HTTP: see [`echo`].
#![allow(clippy::print_stdout, reason = "a container's log is its standard output")]
#![forbid(unsafe_code)]

mod app;
mod config;
mod echo;
mod request_counts;
mod request_ids;
mod requested_response;
mod respond;
mod server;

use std::process::ExitCode;

use config::HelloConfig;

fn main() -> ExitCode {
    let config = match HelloConfig::from_lookup(|name| std::env::var(name).ok()) {
        Ok(config) => config,
        Err(reason) => {
            println!("hello: {reason}");
            return ExitCode::from(2);
        }
    };
    // Written before anything else can exit, as an init container exits right afterwards.
    if let Some((file, text)) = &config.write
        && let Err(error) = std::fs::write(file, text)
    {
        println!("hello: cannot write {}: {error}", file.display());
        return ExitCode::from(2);
    }
    if let Some(code) = config.exit_at_start {
        println!("hello: HELLO_EXIT asks for exit code {code}");
        return ExitCode::from(code);
    }
    // HTTP parsers detect processor features. On a virtual machine this takes 50 µs, better spent before listening.
    #[cfg(target_arch = "x86_64")]
    let _ = std::is_x86_feature_detected!("avx2");
    // One thread: a sample must start at once, and its request count then needs no atomics.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.and_then(|runtime| runtime.block_on(server::run(config))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("hello: {error}");
            ExitCode::FAILURE
        }
    }
}
