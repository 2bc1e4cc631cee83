//! Pure: checks for what Go refuses in a template before it runs.
//!
//! gotmpl accepts more than Go does: it stops at a surplus `{{end}}`, and takes the end of the text for a missing one.
//! It looks up functions, fields and variables only when a branch runs. A setting is shared by all services, so an
//! invalid branch must be refused at once, and not when a service first takes it. The spelling of each action is
//! checked in `actions.rs`.

use gotmpl::parse::{BranchNode, DefineNode, Expr, ListNode, Node, Parser, PipeNode};

use super::actions;

/// Marker after every checked text. No template contains it, so it is parsed last only if the whole text was parsed.
const END: &str = "\u{1}";

/// Functions of Go's text/template.
const FUNCTIONS: [&str; 19] = [
    "and", "call", "eq", "ge", "gt", "html", "index", "js", "le", "len", "lt", "ne", "not", "or",
    "print", "printf", "println", "slice", "urlquery",
];

/// Refuses what Go refuses. `fields` are the fields that dot has at the start.
pub(super) fn check_template(name: &str, source: &str, fields: &[&str]) -> Result<(), String> {
    let wrapped = format!("{source}{END}");
    let parser = Parser::with_name(Some(name), &wrapped, "{{", "}}");
    let parsed = parser.and_then(Parser::parse).map_err(|wrong| wrong.to_string())?;
    let (body, defines) = parsed;
    // gotmpl stops at a surplus `{{end}}` and drops the rest; then the marker is not the last text.
    let last = |it: &Node| matches!(it, Node::Text(text) if text.text.ends_with(END));
    if source.contains(END) || !body.nodes.last().is_some_and(last) {
        return Err(format!("template: {name}: unexpected {{{{end}}}}, or one is missing"));
    }
    actions::check_actions(source).map_err(|what| format!("template: {name}: {what}"))?;
    check_names(name, &body, &defines)?;
    let names: Vec<&str> = defines.iter().map(|it| it.name.as_str()).collect();
    let checker = TemplateChecker { name, fields, defines: &names, dollar: DotValue::Start };
    checker.check_list(&body, &mut TemplateScope::new(DotValue::Start))?;
    defines.iter().try_for_each(|it| checker.check_define(&it.body))
}

/// Refuses two templates of one name. As in Go, one of them may be empty.
fn check_names(name: &str, body: &ListNode, defines: &[DefineNode]) -> Result<(), String> {
    let is_empty = |it: &Node| match it {
        Node::Text(text) => text.text.trim_end_matches(END).trim().is_empty(),
        _ => false,
    };
    let main = (!body.nodes.iter().all(is_empty)).then_some(name);
    let filled = defines.iter().filter(|it| !it.body.is_empty_tree());
    let mut names: Vec<&str> = filled.map(|it| it.name.as_str()).chain(main).collect();
    // Equal names are neighbours then.
    names.sort_unstable();
    match names.windows(2).find(|it| it[0] == it[1]) {
        Some(twice) => {
            Err(format!("template: {name}: multiple definition of template {:?}", twice[0]))
        }
        None => Ok(()),
    }
}

/// Value of dot at a node of the template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DotValue {
    /// The value with which the whole template is rendered.
    Start,
    /// Another value, whose fields are unknown.
    Unknown,
}

/// Dot and the variables that are declared at a node of the template.
#[derive(Clone, Debug)]
struct TemplateScope<'t> {
    dot: DotValue,
    variables: Vec<&'t str>,
}

impl TemplateScope<'_> {
    /// Returns the scope at the start of a template, where only `$` is declared.
    fn new(dot: DotValue) -> Self {
        Self { dot, variables: vec!["$"] }
    }
}

/// Visitor of the parsed template, with the names that exist.
struct TemplateChecker<'a> {
    name: &'a str,
    fields: &'a [&'a str],
    defines: &'a [&'a str],
    /// Value of `$`.
    dollar: DotValue,
}

impl TemplateChecker<'_> {
    /// Checks the nodes of a list. Variables that one declares exist in all that follow.
    fn check_list<'t>(
        &self,
        list: &'t ListNode,
        scope: &mut TemplateScope<'t>,
    ) -> Result<(), String> {
        list.nodes.iter().try_for_each(|node| self.check_node(node, scope))
    }

    fn check_node<'t>(&self, node: &'t Node, scope: &mut TemplateScope<'t>) -> Result<(), String> {
        match node {
            Node::List(list) => self.check_list(list, scope),
            Node::Text(_) | Node::Break(_) | Node::Continue(_) => Ok(()),
            Node::Action(action) => self.check_pipe(&action.pipe, scope),
            Node::If(branch) => self.check_branch(branch, scope, scope.dot),
            // `range` and `with` set dot to another value, whose fields are unknown.
            Node::Range(branch) | Node::With(branch) => {
                self.check_branch(branch, scope, DotValue::Unknown)
            }
            Node::Define(define) => self.check_define(&define.body),
            Node::Template(call) if !self.defines.contains(&call.name.as_str()) => {
                Err(self.error(&format!("template {:?} not defined", call.name)))
            }
            Node::Template(call) => {
                call.pipe.as_ref().map_or(Ok(()), |pipe| self.check_pipe(pipe, scope))
            }
        }
    }

    /// Checks a defined template, in which dot and `$` begin as the argument of its call.
    fn check_define(&self, body: &ListNode) -> Result<(), String> {
        let checker = TemplateChecker { dollar: DotValue::Unknown, ..*self };
        checker.check_list(body, &mut TemplateScope::new(DotValue::Unknown))
    }

    fn check_branch<'t>(
        &self,
        branch: &'t BranchNode,
        scope: &TemplateScope<'t>,
        body_dot: DotValue,
    ) -> Result<(), String> {
        // Variables of the pipeline exist in both parts, and not behind them.
        let mut outer = scope.clone();
        self.check_pipe(&branch.pipe, &mut outer)?;
        let mut inner = TemplateScope { dot: body_dot, ..outer.clone() };
        self.check_list(&branch.body, &mut inner)?;
        // In `else` dot is what it was outside.
        branch.else_body.as_ref().map_or(Ok(()), |list| self.check_list(list, &mut outer))
    }

    /// Checks a pipeline, and adds the variables that it declares to the scope.
    fn check_pipe<'t>(
        &self,
        pipe: &'t PipeNode,
        scope: &mut TemplateScope<'t>,
    ) -> Result<(), String> {
        let args = pipe.commands.iter().flat_map(|command| &command.args);
        args.into_iter().try_for_each(|arg| self.check_expr(arg, scope))?;
        for (command, stage) in pipe.commands.iter().zip(1..).skip(1) {
            // Only a function can take the value of the command before it.
            if let Some(
                Expr::Bool(..) | Expr::Dot(_) | Expr::Nil(_) | Expr::Number(..) | Expr::String(..),
            ) = command.args.first()
            {
                let what = format!("non executable command in pipeline stage {stage}");
                return Err(self.error(&what));
            }
        }
        let declared = pipe.decl.iter().map(|it| it.as_str());
        if pipe.is_assign {
            declared.into_iter().try_for_each(|it| self.check_variable(it, scope))
        } else {
            scope.variables.extend(declared);
            Ok(())
        }
    }

    /// Checks a value: its functions, variables, and fields of the data that is known.
    fn check_expr<'t>(&self, expr: &'t Expr, scope: &TemplateScope<'t>) -> Result<(), String> {
        match expr {
            Expr::Identifier(_, function) if !FUNCTIONS.contains(&function.as_str()) => {
                Err(self.error(&format!("function {:?} not defined", function.as_str())))
            }
            Expr::Field(_, names) if scope.dot == DotValue::Start => {
                self.check_field(names.first().map(|it| it.as_str()))
            }
            // `$` stays what dot was at the start, also within `range` and `with`.
            Expr::Variable(_, variable, names)
                if variable == "$" && self.dollar == DotValue::Start =>
            {
                self.check_field(names.first().map(|it| it.as_str()))
            }
            Expr::Variable(_, variable, _) => self.check_variable(variable.as_str(), scope),
            // Variables that it declares end with the parentheses.
            Expr::Pipe(_, pipe) => self.check_pipe(pipe, &mut scope.clone()),
            Expr::Chain(_, inner, _) => self.check_expr(inner, scope),
            Expr::Dot(_)
            | Expr::Field(..)
            | Expr::Identifier(..)
            | Expr::String(..)
            | Expr::Number(..)
            | Expr::Bool(..)
            | Expr::Nil(_) => Ok(()),
        }
    }

    fn check_variable(&self, variable: &str, scope: &TemplateScope<'_>) -> Result<(), String> {
        match scope.variables.contains(&variable) {
            true => Ok(()),
            false => Err(self.error(&format!("undefined variable {variable:?}"))),
        }
    }

    fn check_field(&self, field: Option<&str>) -> Result<(), String> {
        let Some(field) = field.filter(|it| !self.fields.contains(it)) else { return Ok(()) };
        let field_names: Vec<String> = self.fields.iter().map(|it| format!(".{it}")).collect();
        let field_names = field_names.join(", ");
        Err(self.error(&format!("can't evaluate field {field}: there are {field_names}")))
    }

    fn error(&self, what: &str) -> String {
        format!("template: {}: {what}", self.name)
    }
}
