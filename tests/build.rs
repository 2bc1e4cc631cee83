//! Build script that compiles `servers/echo.proto` for the test servers.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=servers/echo.proto");
    let files = protox::compile(["servers/echo.proto"], ["servers"])?;
    tonic_prost_build::configure().build_client(false).compile_fds(files)?;
    Ok(())
}
