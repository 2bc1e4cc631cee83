//! Shell: checks of the Helm chart: by `helm lint`, and against the objects that `rouse install` applies.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize as _;
use serde_json::Value;

use crate::{
    build::{self, BuildProfile},
    cluster, sh,
    workspace::CargoWorkspace,
};

/// Path of the chart, from the root of the repository.
const CHART: &str = "deploy/helm";
/// Manifests of the same objects for `kubectl apply -k`.
const FILES: [&str; 2] = ["deploy/crds.yaml", "deploy/rouse.yaml"];
const NAMESPACE: &str = "knative-serving";
/// Values of type string: name, equivalent flag of `rouse install`, value. Unusual on purpose: YAML would read some
/// of them as numbers.
const STRING_VALUES: [(&str, &str, &str); 3] = [
    ("image", "--image", "registry.example:5000/rouse:1.2"),
    ("domain", "--domain", "1.5"),
    ("clusterDomain", "--cluster-domain", "corp.internal"),
];
const GATEWAYS: [&str; 3] = ["loadbalancer", "nodeport", "hostport"];
const PROFILES: [&str; 2] = ["standard", "fast"];
/// Values that the chart's schema must refuse.
const INVALID_VALUES: [&str; 6] = [
    "gateway=ingress",
    "profile=quick",
    "domain=Example.com",
    "clusterDomain=",
    "image=",
    "gatway=nodeport",
];

/// Objects by kind, namespace and name.
type RenderedObjects = BTreeMap<String, Value>;

/// Name of a check, and its function.
pub(crate) type ChartCheck = (&'static str, fn(&HelmChart) -> Result<()>);

/// All checks, in the order in which they run.
pub(crate) const CHECKS: [ChartCheck; 5] = [
    ("chart::helm_finds_nothing_wrong", check_lint),
    ("chart::defaults_make_what_deploy_holds", check_defaults),
    ("chart::values_make_what_flags_install", check_values),
    ("chart::values_that_mean_nothing_are_refused", check_invalid_values),
    ("chart::the_package_makes_the_same", check_package),
];

/// Runs `cargo xtask chart`: all checks, up to the first that fails.
pub(crate) fn run() -> Result<()> {
    let workspace = CargoWorkspace::load()?;
    let chart = HelmChart::find(&workspace, build::build_rouse(&workspace, BuildProfile::Debug)?)?;
    for (name, check) in CHECKS {
        check(&chart).context(name)?;
        println!("{name}: ok");
    }
    Ok(())
}

/// The chart and the programs that check it.
#[derive(Debug)]
pub(crate) struct HelmChart {
    helm: PathBuf,
    rouse: PathBuf,
    root: PathBuf,
    /// Scratch directory: for packages, and as Helm's home instead of the user's.
    scratch: PathBuf,
}

impl HelmChart {
    /// Prepares checks against the objects that `rouse` installs; builds Helm if it is missing.
    pub(crate) fn find(workspace: &CargoWorkspace, rouse: PathBuf) -> Result<Self> {
        let scratch = workspace.target.join("chart");
        // Packages of an earlier run would be found beside the new one.
        let _absent = fs::remove_dir_all(&scratch);
        fs::create_dir_all(&scratch)
            .with_context(|| format!("cannot make {}", scratch.display()))?;
        Ok(Self { helm: cluster::helm()?, rouse, root: workspace.root.clone(), scratch })
    }

    fn helm_command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.helm);
        command.args(args).current_dir(&self.root).env_remove("KUBECONFIG");
        for home in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            command.env(home, &self.scratch);
        }
        command
    }

    /// Objects that Helm renders from the chart in `folder` with the given values.
    fn render(&self, folder: &str, namespace: &str, values: &[String]) -> Result<RenderedObjects> {
        let args = ["template", "rouse", folder, "--include-crds", "--namespace", namespace];
        let mut command = self.helm_command(&args);
        command.args(values.iter().flat_map(|it| ["--set-string", it]));
        parse_objects(&sh::capture(&mut command)?)
    }
}

fn check_lint(chart: &HelmChart) -> Result<()> {
    let sets = GATEWAYS.iter().flat_map(|gateway| {
        PROFILES.iter().map(move |profile| format!("gateway={gateway},profile={profile}"))
    });
    for set in sets {
        sh::run(&mut chart.helm_command(&["lint", "--strict", "--quiet", "--set", &set, CHART]))?;
    }
    Ok(())
}

fn check_defaults(chart: &HelmChart) -> Result<()> {
    let mut text = String::new();
    for file in FILES {
        let file = chart.root.join(file);
        text += &fs::read_to_string(&file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        text += "\n---\n";
    }
    compare_objects(&chart.render(CHART, NAMESPACE, &[])?, &parse_objects(&text)?)
}

fn check_values(chart: &HelmChart) -> Result<()> {
    for (gateway, namespace) in GATEWAYS.into_iter().zip([NAMESPACE, "elsewhere", "42"]) {
        for profile in PROFILES {
            // Namespaces vary together with gateways, to cover odd ones without a third loop.
            let choices = [("gateway", "--gateway", gateway), ("profile", "--profile", profile)];
            let values = choices.iter().chain(&STRING_VALUES);
            let set: Vec<String> =
                values.clone().map(|(value, _, it)| format!("{value}={it}")).collect();
            let flags = values.flat_map(|(_, flag, it)| [*flag, *it]);
            let mut install = Command::new(&chart.rouse);
            install.args(["install", "--namespace", namespace]).args(flags);
            let installed = parse_objects(&sh::capture(&mut install)?)?;
            compare_objects(&chart.render(CHART, namespace, &set)?, &installed)
                .with_context(|| format!("namespace {namespace}, {}", set.join(", ")))?;
        }
    }
    Ok(())
}

fn check_invalid_values(chart: &HelmChart) -> Result<()> {
    for value in INVALID_VALUES {
        let mut command = chart.helm_command(&["template", "rouse", CHART, "--set-string", value]);
        let output = command.stdout(Stdio::null()).output().context("cannot start helm")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        let name = value.split('=').next().unwrap_or_default();
        // An error in the template itself also fails, but is no refusal by the schema.
        if output.status.success() || !stderr.contains("schema") || !stderr.contains(name) {
            bail!("{value} was not refused as it should: {stderr}");
        }
    }
    Ok(())
}

fn check_package(chart: &HelmChart) -> Result<()> {
    let folder = chart.scratch.display().to_string();
    sh::capture(&mut chart.helm_command(&["package", CHART, "--destination", &folder]))?;
    let files = fs::read_dir(&chart.scratch)?.flatten().map(|entry| entry.path());
    let packages: Vec<PathBuf> =
        files.filter(|file| file.extension().is_some_and(|it| it == "tgz")).collect();
    let [package] = &packages[..] else { bail!("helm packed {packages:?}") };
    let text = |path: &Path| path.display().to_string();
    compare_objects(
        &chart.render(&text(package), NAMESPACE, &[])?,
        &chart.render(CHART, NAMESPACE, &[])?,
    )
}

/// Parses objects from YAML. Namespaces are left out: Helm creates them by a flag of its own.
fn parse_objects(yaml: &str) -> Result<RenderedObjects> {
    let mut objects = RenderedObjects::new();
    for document in serde_norway::Deserializer::from_str(yaml) {
        let object = Value::deserialize(document).context("no YAML")?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let (Some(kind), meta) = (text(&object["kind"]), &object["metadata"]) else {
            // A document of comments alone.
            if object.is_null() {
                continue;
            }
            bail!("no object: {object}");
        };
        let name = text(&meta["name"]).with_context(|| format!("{kind} has no name"))?;
        let namespace = text(&meta["namespace"]).unwrap_or_default();
        if kind != "Namespace"
            && objects.insert(format!("{kind} {namespace}/{name}"), object).is_some()
        {
            bail!("{kind} {namespace}/{name} is there twice");
        }
    }
    Ok(objects)
}

/// Fails unless both hold equal objects, and lists the differences.
fn compare_objects(rendered: &RenderedObjects, expected: &RenderedObjects) -> Result<()> {
    let names: std::collections::BTreeSet<&String> =
        rendered.keys().chain(expected.keys()).collect();
    // Compared by value: order of keys and layout of the YAML do not matter.
    let differs = names.into_iter().filter(|name| rendered.get(*name) != expected.get(*name));
    let differences: Vec<String> = differs
        .map(|name| match (rendered.get(name), expected.get(name)) {
            (Some(_), None) => format!("{name}: only the chart has it"),
            (None, _) => format!("{name}: the chart lacks it"),
            (Some(rendered), Some(expected)) => {
                format!("{name} is {rendered}\n  and should be {expected}")
            }
        })
        .collect();
    if !differences.is_empty() {
        bail!("{} objects differ:\n{}", differences.len(), differences.join("\n"));
    }
    // Two empty sets would be equal: without this check, a wrong path would pass.
    if expected.is_empty() {
        bail!("there is nothing to compare");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_told_apart_by_kind_and_place_and_compared_whole() {
        let yaml = "# Source: a\n---\nkind: A\nmetadata: {name: n, namespace: s}\nx: 1\n---\n\
                    kind: Namespace\nmetadata: {name: s}\n---\nkind: B\nmetadata: {name: n}\n";
        let objects = parse_objects(yaml).expect("objects");
        assert_eq!(objects.keys().collect::<Vec<_>>(), ["A s/n", "B /n"]);
        assert!(compare_objects(&objects, &objects).is_ok());
        let other = parse_objects(&yaml.replace("x: 1", "x: 2")).expect("objects");
        let message = compare_objects(&objects, &other).expect_err("one differs").to_string();
        assert!(message.starts_with("1 objects differ:\nA s/n is {"), "{message}");
        assert!(compare_objects(&RenderedObjects::new(), &RenderedObjects::new()).is_err());
        assert!(
            parse_objects("kind: A\nmetadata: {name: n}\n---\nkind: A\nmetadata: {name: n}")
                .is_err()
        );
    }

    #[test]
    fn a_number_is_no_name() {
        assert!(parse_objects("kind: A\nmetadata: {name: 42}").is_err());
        let odd = parse_objects("kind: A\nmetadata: {name: n, namespace: 42}").expect("objects");
        let text = parse_objects("kind: A\nmetadata: {name: n, namespace: '42'}").expect("objects");
        assert!(compare_objects(&odd, &text).is_err());
    }
}
