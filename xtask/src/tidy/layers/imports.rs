//! Pure: search for the imports of one file, and the path of its module.

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use super::ModulePath;
use crate::tidy::rules::SourceFile;

/// Returns the path of a file's module. `None`: the file belongs to tests or to another binary.
pub(super) fn module_path(file: &SourceFile<'_>) -> Option<ModulePath> {
    let (_, inside) = file.path.split_once("/src/")?;
    let names: ModulePath = inside.strip_suffix(".rs")?.split('/').map(str::to_owned).collect();
    let skipped = ["tests", "bin"];
    match names[0].as_str() {
        "lib" | "main" if names.len() == 1 => Some(Vec::new()),
        _ if names.iter().any(|it| skipped.contains(&it.as_str())) => None,
        _ => Some(names),
    }
}

/// Collects the imports of one file.
pub(super) struct ImportCollector<'a> {
    pub(super) path: &'a ModulePath,
    /// Number of inline modules around the current item.
    pub(super) depth: usize,
    /// Path of the file.
    pub(super) file: &'a str,
    pub(super) edges: &'a mut Vec<(ModulePath, ModulePath, String)>,
}

impl ImportCollector<'_> {
    /// Adds the import of a path that begins with `crate` or `super`. Others name items in scope or other crates.
    fn add(&mut self, path: &[String]) {
        let mut inline = self.depth;
        let mut base = self.path.clone();
        let ups = path.iter().take_while(|it| *it == "super").count();
        let rest = match path.first().map(String::as_str) {
            Some("crate") => {
                base.clear();
                &path[1..]
            }
            Some("super") => {
                for _ in 0..ups {
                    // A `super` inside an inline module leads out of that one only.
                    match inline.checked_sub(1) {
                        Some(left) => inline = left,
                        None => drop(base.pop()),
                    }
                }
                &path[ups..]
            }
            _ => return,
        };
        base.extend(rest.iter().cloned());
        self.edges.push((self.path.clone(), base, self.file.to_owned()));
    }

    fn add_tree(&mut self, before: &mut ModulePath, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => {
                before.push(path.ident.to_string());
                // One path serves all branches: each adds its part and takes it away again.
                self.add_tree(before, &path.tree);
                before.pop();
            }
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|it| self.add_tree(before, it));
            }
            syn::UseTree::Name(syn::UseName { ident, .. })
            | syn::UseTree::Rename(syn::UseRename { ident, .. }) => {
                before.push(ident.to_string());
                self.add(before);
                before.pop();
            }
            syn::UseTree::Glob(_) => self.add(before),
        }
    }

    /// Adds the paths in the arguments of a macro, which are tokens only.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut path = ModulePath::new();
        // Colons since the last name of `path`: two of them and a name continue it.
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Ident(ident) if colons == 2 && !path.is_empty() => {
                    path.push(ident.to_string());
                    colons = 0;
                }
                other => {
                    self.add(&path);
                    path.clear();
                    colons = 0;
                    match other {
                        TokenTree::Ident(ident) => path.push(ident.to_string()),
                        TokenTree::Group(group) => self.add_tokens(group.stream()),
                        _ => {}
                    }
                }
            }
        }
        self.add(&path);
    }
}

impl<'ast> Visit<'ast> for ImportCollector<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        let is_test = item.attrs.iter().any(|attribute| {
            attribute
                .meta
                .require_list()
                .is_ok_and(|list| list.tokens.to_string().starts_with("test"))
        });
        if !is_test {
            self.depth += 1;
            visit::visit_item_mod(self, item);
            self.depth -= 1;
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.add_tree(&mut ModulePath::new(), &item.tree);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: ModulePath = path.segments.iter().map(|it| it.ident.to_string()).collect();
        self.add(&names);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.add_tokens(item.tokens.clone());
        visit::visit_macro(self, item);
    }

    /// The path of a visibility, as in `pub(in crate::a)`, imports nothing.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}
}
