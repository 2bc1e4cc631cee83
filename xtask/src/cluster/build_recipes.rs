//! Pure: build recipes of the cluster's programs: Go modules, versions and flags.

use sha2::{Digest as _, Sha256};

use super::versions::{
    CONTAINERD, COREDNS, ETCD, GATEWAY_API, HELM, KN, KubernetesVersion, PROMETHEUS,
};

/// Main package of CoreDNS with the plugins of a cluster only; all plugins would add libraries of three clouds.
const COREDNS_MAIN: &str = include_str!("coredns.go");
/// Main package of the conformance tests of the Gateway API.
const GATEWAY_CONFORMANCE_MAIN: &str = include_str!("gateway_conformance.go");
/// Kinds of the Gateway API, from the standard channel.
const GATEWAY_KINDS: ManifestModule = ManifestModule {
    module: "sigs.k8s.io/gateway-api",
    folder: "config/crd/standard",
    file: "crds.yaml",
};
/// Module of Kubernetes, whose staged modules are replaced by the published ones of the same release.
const KUBERNETES: &str = "k8s.io/kubernetes";
/// Version of the build procedure; a change of it changes all cache directories.
const BUILD_PROCEDURE: &str = "CGO_ENABLED=0 -trimpath -mod=mod 1";

/// Programs of Kubernetes; those that other processes wait for come first.
pub(crate) const KUBERNETES_PROGRAMS: [&str; 6] = [
    "kube-apiserver",
    "kubectl",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
];

/// Programs that are built from one version of one module, and manifests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BuildRecipe {
    /// Short name, shown to users and used for directories.
    pub(crate) name: &'static str,
    pub(crate) module: &'static str,
    pub(crate) version: String,
    tags: &'static str,
    ldflags: String,
    /// Packages to build, each with the name of its program. Empty if only the manifests are wanted.
    pub(crate) programs: Vec<(String, &'static str)>,
    /// Source of a main package in place of the module's.
    pub(crate) main: Option<&'static str>,
    /// Version of the staged modules; `None` except for Kubernetes.
    pub(crate) staging: Option<String>,
    /// Module whose manifests are kept beside the programs.
    pub(crate) manifests: Option<ManifestModule>,
    /// True if a cluster works without its programs.
    pub(crate) is_optional: bool,
    /// Build time in seconds on two cores with an empty cache.
    pub(crate) seconds: u32,
}

/// Module with manifests, of the version of its recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ManifestModule {
    pub(crate) module: &'static str,
    /// Directory of the manifests within the module.
    pub(crate) folder: &'static str,
    /// Name of the file with all of them.
    pub(crate) file: &'static str,
}

impl BuildRecipe {
    /// Recipe of the Kubernetes programs of one version.
    pub(crate) fn kubernetes(version: KubernetesVersion) -> Self {
        let stamp = "k8s.io/component-base/version";
        let ldflags = format!(
            "-s -w -X {stamp}.gitVersion={version} -X {stamp}.gitMajor=1 -X {stamp}.gitMinor={} \
             -X {stamp}.gitTreeState=clean",
            version.minor
        );
        let package = |program| (format!("{KUBERNETES}/cmd/{program}"), program);
        Self {
            name: "kubernetes",
            module: KUBERNETES,
            version: version.to_string(),
            tags: "",
            ldflags,
            programs: KUBERNETES_PROGRAMS.map(package).to_vec(),
            main: None,
            staging: Some(version.staging()),
            manifests: None,
            is_optional: false,
            seconds: 380,
        }
    }

    /// Recipes of the programs that all Kubernetes versions share.
    pub(crate) fn version_independent() -> [Self; 4] {
        [Self::etcd(), Self::containerd(), Self::coredns(), Self::kn()]
    }

    fn etcd() -> Self {
        let module = "go.etcd.io/etcd/server/v3";
        plain_recipe("etcd", module, ETCD, vec![(module.to_owned(), "etcd")], 15)
    }

    fn containerd() -> Self {
        let module = "github.com/containerd/containerd/v2";
        let programs = ["containerd", "containerd-shim-runc-v2", "ctr"];
        let programs = programs.map(|program| (format!("{module}/cmd/{program}"), program));
        Self {
            // Snapshotters that are not used here and would need C libraries.
            tags: "no_btrfs no_zfs no_devmapper",
            ..plain_recipe("containerd", module, CONTAINERD, programs.to_vec(), 70)
        }
    }

    fn coredns() -> Self {
        let module = "github.com/coredns/coredns";
        let programs = vec![(".".to_owned(), "coredns")];
        Self { main: Some(COREDNS_MAIN), ..plain_recipe("coredns", module, COREDNS, programs, 60) }
    }

    fn kn() -> Self {
        let module = "knative.dev/client";
        let programs = vec![(format!("{module}/cmd/kn"), "kn")];
        // Optional: not every mirror has all of its modules, and users with kn on the PATH need no build.
        Self { is_optional: true, ..plain_recipe("kn", module, KN, programs, 60) }
    }

    /// Recipe of the tool that checks Prometheus rules; no part of a cluster.
    pub(crate) fn promtool() -> Self {
        let module = "github.com/prometheus/prometheus";
        let programs = vec![(format!("{module}/cmd/promtool"), "promtool")];
        plain_recipe("promtool", module, PROMETHEUS, programs, 300)
    }

    /// Recipe of the tool that renders and checks the Helm chart; no part of a cluster.
    pub(crate) fn helm() -> Self {
        let module = "helm.sh/helm/v4";
        let programs = vec![(format!("{module}/cmd/helm"), "helm")];
        plain_recipe("helm", module, HELM, programs, 420)
    }

    /// Recipe of the conformance tests of the Gateway API, and of the server of their backends; no part of a cluster.
    pub(crate) fn gateway_conformance() -> Self {
        let module = "sigs.k8s.io/gateway-api/conformance";
        let server = (format!("{module}/echo-basic"), "echo-basic");
        let programs = vec![(".".to_owned(), "gateway-conformance"), server];
        Self {
            main: Some(GATEWAY_CONFORMANCE_MAIN),
            manifests: Some(GATEWAY_KINDS),
            ..plain_recipe("gateway-conformance", module, GATEWAY_API, programs, 200)
        }
    }

    /// Recipe of the kinds of the Gateway API alone, which takes seconds and builds nothing.
    pub(crate) fn gateway_kinds() -> Self {
        let module = GATEWAY_KINDS.module;
        Self {
            manifests: Some(GATEWAY_KINDS),
            ..plain_recipe("gateway-kinds", module, GATEWAY_API, Vec::new(), 10)
        }
    }

    /// Name of its cache directory for the processor architecture `arch`, with a hash of all inputs of the build.
    pub(crate) fn folder(&self, arch: &str) -> String {
        // All fields but the expected time and `is_optional`, which do not change the programs.
        let mut hash = Sha256::new();
        let Self {
            name, module, version, tags, ldflags, programs, main, staging, manifests, ..
        } = self;
        hash.update(format!("{BUILD_PROCEDURE} {arch} {name} {module} {version} {tags} {ldflags}"));
        hash.update(format!("{programs:?} {main:?} {staging:?}"));
        // Only if there are any, so that the directories of all other recipes keep their names.
        if let Some(manifests) = manifests {
            hash.update(format!("{manifests:?}"));
        }
        let digest: String =
            hash.finalize()[..6].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{}-{}-{digest}", self.name, self.version)
    }

    /// Content of the scratch module's `go.mod`; `published` is the `go.mod` of the module to build.
    pub(crate) fn go_mod(&self, published: &str) -> String {
        // The module's own `go` line, because language version and defaults depend on it.
        let go_line = published.lines().find(|line| line.starts_with("go ")).unwrap_or("go 1.24");
        let mut text = format!(
            "module rouse.dev/{}\n\n{go_line}\n\nrequire {} {}\n",
            self.name, self.module, self.version
        );
        if let Some(ManifestModule { module, .. }) = self.manifests {
            text.push_str(&format!("require {module} {}\n", self.version));
        }
        let Some(version) = &self.staging else { return text };
        for module in staged_modules(published) {
            text.push_str(&format!("replace {module} => {module} {version}\n"));
        }
        text
    }

    /// Arguments of `go` to build `package` into `file`.
    pub(crate) fn build_args(&self, package: &str, file: &str) -> Vec<String> {
        let args = ["build", "-v", "-trimpath", "-tags", self.tags, "-ldflags", &self.ldflags];
        let args = args.into_iter().chain(["-o", file, package]);
        args.map(str::to_owned).collect()
    }
}

fn plain_recipe(
    name: &'static str,
    module: &'static str,
    version: &str,
    programs: Vec<(String, &'static str)>,
    seconds: u32,
) -> BuildRecipe {
    BuildRecipe {
        name,
        module,
        version: version.to_owned(),
        tags: "",
        ldflags: "-s -w".to_owned(),
        programs,
        main: None,
        staging: None,
        manifests: None,
        is_optional: false,
        seconds,
    }
}

/// Names of the modules that Kubernetes' own `go.mod` replaces by directories of its repository.
fn staged_modules(go_mod: &str) -> impl Iterator<Item = &str> {
    go_mod.lines().filter_map(|line| {
        let (module, to) = line.trim().trim_start_matches("replace ").split_once(" => ")?;
        to.starts_with("./staging/").then_some(module.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PUBLISHED: &str = "module k8s.io/kubernetes\n\ngo 1.26.0\n\nreplace (\n\tk8s.io/api => ./staging/src/k8s.io/api\n\tother => ./elsewhere\n)\n";

    #[test]
    fn staged_modules_are_replaced_by_the_published_ones() {
        let version = KubernetesVersion { minor: 36, patch: 3 };
        assert_eq!(
            BuildRecipe::kubernetes(version).go_mod(PUBLISHED),
            "module rouse.dev/kubernetes\n\ngo 1.26.0\n\nrequire k8s.io/kubernetes v1.36.3\n\
             replace k8s.io/api => k8s.io/api v0.36.3\n"
        );
    }

    #[test]
    fn a_module_with_manifests_is_required_at_the_same_version() {
        let recipe = BuildRecipe::gateway_conformance();
        assert_eq!(
            recipe.go_mod("module x\n\ngo 1.26.0\n\nreplace sigs.k8s.io/gateway-api => ../\n"),
            format!(
                "module rouse.dev/gateway-conformance\n\ngo 1.26.0\n\n\
                 require sigs.k8s.io/gateway-api/conformance {GATEWAY_API}\n\
                 require sigs.k8s.io/gateway-api {GATEWAY_API}\n"
            )
        );
        let other_manifests = BuildRecipe { manifests: None, ..recipe.clone() };
        assert_ne!(recipe.folder("x86_64"), other_manifests.folder("x86_64"));
    }

    #[test]
    fn the_kinds_alone_are_those_of_the_conformance_tests() {
        let (kinds, suite) = (BuildRecipe::gateway_kinds(), BuildRecipe::gateway_conformance());
        assert_eq!((&kinds.version, kinds.manifests), (&suite.version, suite.manifests));
        assert!(kinds.programs.is_empty(), "nothing is built");
        assert_ne!(kinds.folder("x86_64"), suite.folder("x86_64"));
    }

    #[test]
    fn each_version_has_a_folder_of_its_own() {
        let folder =
            |minor| BuildRecipe::kubernetes(KubernetesVersion { minor, patch: 1 }).folder("x86_64");
        assert_ne!(folder(35), folder(36));
        assert_eq!(folder(36), folder(36));
        assert!(folder(36).starts_with("kubernetes-v1.36.1-"));
    }

    #[test]
    fn the_version_is_stamped_into_the_programs() {
        let recipe = BuildRecipe::kubernetes(KubernetesVersion { minor: 33, patch: 13 });
        let args = recipe.build_args("k8s.io/kubernetes/cmd/kubelet", "/x/kubelet");
        assert!(args.iter().any(|arg| arg.contains("gitVersion=v1.33.13")));
        assert_eq!(args.last().map(String::as_str), Some("k8s.io/kubernetes/cmd/kubelet"));
    }
}
