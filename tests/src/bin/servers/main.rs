//! Executable `servers`: the servers of the kernel tier's table that are written in Rust: hyper's and tonic's.
//!
//! tests/servers/README.md describes the requirements of a server.
#![allow(clippy::print_stderr, reason = "a program's errors are for its user")]

mod grpc;
mod http;
mod request_record;

use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("servers: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<()> {
    let role = std::env::args().nth(1).unwrap_or_default();
    let address = std::env::var("ADDRESS").context("ADDRESS is not set")?;
    let listener = TcpListener::bind(&address).await;
    let listener = listener.with_context(|| format!("cannot listen on {address}"))?;
    match role.as_str() {
        "http" => http::serve(listener).await,
        "grpc" => grpc::serve(listener).await,
        other => bail!("there is no role `{other}`: http or grpc"),
    }
}
