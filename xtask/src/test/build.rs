//! Shell: builds of test programs, always of the same packages and with the same eBPF programs, so that Cargo builds
//! no crate twice with different features.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, anyhow, bail};
use serde::{Deserialize, Serialize};

use crate::{build_ebpf, sh, workspace::CargoWorkspace};

/// Builder of all test programs of a test run.
#[derive(Debug)]
pub(super) struct TestBuilder {
    /// Workspace that the programs are built from.
    pub(super) workspace: CargoWorkspace,
    /// Path of the eBPF object, or the reason why there is none.
    object: Result<PathBuf, String>,
    /// Test programs that another process has built; `None` if this process builds them.
    prebuilt: Option<Vec<TestProgram>>,
}

/// A test program that cargo built.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct TestProgram {
    /// Name of the test, as `cargo test --test` takes it.
    name: String,
    /// Directory of its package.
    pub(super) folder: String,
    /// Path of its root source file.
    pub(super) source: String,
    pub(super) executable: String,
}

impl TestBuilder {
    /// Creates a builder without the eBPF programs, which need a compiler of their own.
    pub(super) fn without_ebpf(workspace: CargoWorkspace) -> Self {
        Self { workspace, object: Err("no chosen tier needs them".to_owned()), prebuilt: None }
    }

    /// Creates a builder with the eBPF programs, which are built here if `prepared` is `Ok`. After an error, only tiers
    /// that need them fail.
    pub(super) fn with_ebpf(workspace: CargoWorkspace, prepared: Result<()>) -> Self {
        let object = prepared.and_then(|()| build_ebpf::build_object(&workspace));
        Self { workspace, object: object.map_err(|error| format!("{error:#}")), prebuilt: None }
    }

    /// Returns this builder with the programs that `file` lists, in place of those that Cargo would build.
    pub(super) fn with_prebuilt(self, file: &Path) -> Result<Self> {
        let text = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        let built = serde_json::from_slice(&text);
        let built = built.with_context(|| format!("{} lists no test programs", file.display()))?;
        Ok(Self { prebuilt: Some(built), ..self })
    }

    /// Path of the eBPF object. Fails with the reason if there is none.
    pub(super) fn object(&self) -> Result<&Path> {
        self.object.as_deref().map_err(|error| anyhow!("there are no eBPF programs: {error}"))
    }

    /// Returns the command `cargo test ARGS`, for all packages except the eBPF programs and xtask.
    ///
    /// xtask is built alone. It uses crates at run time that procedural macros use at compile time. With the profile's
    /// `lto = "off"`, Cargo builds such crates differently where both uses are in one graph. So all crates with macros
    /// would be built twice: once for the root tiers, and once for all tests.
    fn cargo_test(&self) -> Command {
        self.cargo_test_of(&["--workspace", "--exclude", "ebpf", "--exclude", "xtask"])
    }

    /// Returns the command `cargo test` for some packages.
    fn cargo_test_of(&self, packages: &[&str]) -> Command {
        let mut command = sh::cargo();
        command.args(["test", "--quiet"]).args(packages);
        command.envs(self.object.iter().map(|object| (build_ebpf::OBJECT_VARIABLE, object)));
        command.current_dir(&self.workspace.root);
        command
    }

    /// Builds all tests that need no root, and those that do, with the programs that they start.
    pub(super) fn build_all_tests(&self) -> Result<Vec<TestProgram>> {
        let mut built = self.build_tests(&[])?;
        built.extend(build_programs(self.cargo_test_of(&["--package", "xtask"]), &[])?);
        Ok(built)
    }

    /// Builds the tests that `args` choose, or all tests except those of xtask, with the programs that they start.
    pub(super) fn build_tests(&self, args: &[&str]) -> Result<Vec<TestProgram>> {
        if let Some(built) = &self.prebuilt {
            let requested = built.iter().filter(|it| args.contains(&it.name.as_str()));
            return Ok(requested.cloned().collect());
        }
        build_programs(self.cargo_test(), args)
    }

    /// Builds `rouse` and returns the path of the executable.
    pub(super) fn build_rouse(&self) -> Result<PathBuf> {
        // Building an integration test of `rouse` builds the program as well.
        self.build_tests(&["--test", "cli"])?;
        Ok(self.workspace.target.join("debug/rouse"))
    }

    /// Builds one test target of the package `tests`, and returns the path of the executable.
    pub(super) fn build_target(&self, target: &str) -> Result<String> {
        // Cargo reports several programs, so the wanted one is found by its source.
        let source = format!("tests/{target}/main.rs");
        let built = self.build_tests(&["--test", target])?;
        let program = built.into_iter().find(|it| it.source.ends_with(&source));
        program.map(|it| it.executable).with_context(|| format!("cargo built no test of {source}"))
    }
}

/// Builds the test programs of a command `cargo test` that `args` choose, without running them.
fn build_programs(mut cargo_test: Command, args: &[&str]) -> Result<Vec<TestProgram>> {
    let mut built = Vec::new();
    cargo_test.arg("--no-run").args(args).arg("--message-format=json-render-diagnostics");
    let is_success = sh::run_with_lines(&mut cargo_test, |line| {
        let message: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
        let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
        let manifest = text(&message["manifest_path"]).unwrap_or_default();
        // Cargo also reports ordinary programs and examples that tests need.
        let is_test = message["profile"]["test"] == true;
        if let Some(executable) = text(&message["executable"]).filter(|_| is_test) {
            built.push(TestProgram {
                name: text(&message["target"]["name"]).unwrap_or_default(),
                folder: manifest.trim_end_matches("/Cargo.toml").to_owned(),
                source: text(&message["target"]["src_path"]).unwrap_or_default(),
                executable,
            });
        }
    })?;
    if !is_success {
        bail!("the tests do not compile");
    }
    Ok(built)
}
