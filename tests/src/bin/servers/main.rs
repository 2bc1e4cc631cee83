//! Executable `servers`: the servers of the kernel tier's table that are written in Rust, which are those of hyper and
//! tonic, and a client with the pool of hyper-util.
//!
//! tests/servers/README.md describes the requirements of a server and of such a client.
#![allow(clippy::print_stderr, reason = "a program's errors are for its user")]

mod grpc;
mod http;
mod pools;
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
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["http"] => http::serve(listen().await?).await,
        ["grpc"] => grpc::serve(listen().await?).await,
        ["rounds", url, workers] => pools::run(url, workers).await,
        _ => bail!("usage: servers http | grpc | rounds URL WORKERS"),
    }
}

/// Listens on the address of the server's environment.
async fn listen() -> Result<TcpListener> {
    let address = std::env::var("ADDRESS").context("ADDRESS is not set")?;
    let listener = TcpListener::bind(&address).await;
    listener.with_context(|| format!("cannot listen on {address}"))
}
