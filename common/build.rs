//! Compiles `proto/rouse.proto` with a compiler written in Rust, so that no system protoc is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/rouse.proto");
    let files = protox::compile(["proto/rouse.proto"], ["proto"])?;
    // Its `Debug` is written by hand: it must not print the private key.
    tonic_prost_build::configure().skip_debug([".rouse.v1.Certificate"]).compile_fds(files)?;
    Ok(())
}
