package nsq

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What users are told is compared with the code, as far as a program can.

func TestEveryExportedNameIsDocumented(t *testing.T) {
	eachDocumented(t, func(name, doc string, _ ast.Node) {
		assert.NotEmpty(t, doc, "%s has no comment", name)
	})
}

var tellsErrors = regexp.MustCompile(`(?i)\berr(or|ors)?\b|\bErr[A-Z]|\bfail|\bnil\b|\*\[?[A-Z]\w*Error`)

func TestEveryErrorResultIsExplained(t *testing.T) {
	eachDocumented(t, func(name, doc string, node ast.Node) {
		f, ok := node.(*ast.FuncDecl)
		if !ok || f.Type.Results == nil {
			return
		}
		for _, result := range f.Type.Results.List {
			if id, ok := result.Type.(*ast.Ident); ok && id.Name == "error" {
				assert.Regexp(t, tellsErrors, doc, "%s does not say which errors it returns", name)
			}
		}
	})
}

func TestOptionsAreDocumentedWithTheirDefaultsAndLimits(t *testing.T) {
	docs := map[string]string{}
	for _, file := range parseLibrary(t) {
		ast.Inspect(file, func(n ast.Node) bool {
			if spec, ok := n.(*ast.TypeSpec); ok && spec.Name.Name == "Config" {
				for _, field := range spec.Type.(*ast.StructType).Fields.List {
					for _, name := range field.Names {
						docs[name.Name] = strings.Join(strings.Fields(field.Doc.Text()), " ")
					}
				}
			}
			return true
		})
	}
	for _, o := range options() {
		doc := docs[o.field]
		assert.True(t, regexp.MustCompile(`^`+o.field+`\b`).MatchString(doc), "the comment of %s begins with %q", o.field, doc)
		assert.Regexp(t, `(?i)\bdefault\b`, doc, "%s", o.field)
		if o.def != "" && o.typ != strategyType {
			assert.Regexp(t, `(?i)\bdefault `+regexp.QuoteMeta(o.def)+`\b`, doc, "default of %s", o.field)
		}
		if o.typ == durationType && o.max != "" {
			assert.Regexp(t, `\bfrom `+o.min+` to `+o.max+`\b`, doc, "limits of %s", o.field)
		}
		if o.typ == durationType && o.initial.IsValid() && o.off != "-1ns" && (o.min == "0" || o.off == "0") {
			assert.Regexp(t, `(?i)\bzero\b`, doc, "%s does not say what zero means", o.field)
		}
	}
}

func parseLibrary(t *testing.T) (files []*ast.File) {
	names, err := filepath.Glob("*.go")
	require.NoError(t, err)
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		require.NoError(t, err)
		files = append(files, file)
	}
	return files
}

// eachDocumented calls visit with all exported names of the package, methods of exported types included.
func eachDocumented(t *testing.T, visit func(name, doc string, node ast.Node)) {
	found := 0
	see := func(name, doc string, node ast.Node) {
		found++
		visit(name, doc, node)
	}
	for _, file := range parseLibrary(t) {
		for _, decl := range file.Decls {
			switch decl := decl.(type) {
			case *ast.FuncDecl:
				if name := decl.Name.Name; decl.Name.IsExported() && exportedReceiver(decl) && !wellKnown[name] {
					see(name, decl.Doc.Text(), decl)
				}
			case *ast.GenDecl:
				for _, spec := range decl.Specs {
					switch spec := spec.(type) {
					case *ast.TypeSpec:
						if spec.Name.IsExported() {
							see(spec.Name.Name, decl.Doc.Text()+spec.Doc.Text(), spec)
						}
					case *ast.ValueSpec:
						for _, name := range spec.Names {
							if name.IsExported() {
								see(name.Name, decl.Doc.Text()+spec.Doc.Text()+spec.Comment.Text(), spec)
							}
						}
					}
				}
			}
		}
	}
	assert.Greater(t, found, 100)
}

// wellKnown are methods of interfaces whose meaning nobody has to be told.
var wellKnown = map[string]bool{"Error": true, "Unwrap": true, "Is": true, "String": true, "Timeout": true, "Temporary": true}

func exportedReceiver(f *ast.FuncDecl) bool {
	if f.Recv == nil {
		return true
	}
	typ := f.Recv.List[0].Type
	if star, ok := typ.(*ast.StarExpr); ok {
		typ = star.X
	}
	id, ok := typ.(*ast.Ident)
	return ok && id.IsExported()
}

// ARCHITECTURE.md and FAULTS.md name the tests that show what they say.
func TestTestsNamedInTheDocumentsExist(t *testing.T) {
	if _, err := os.Stat("nsqtest"); err != nil {
		t.Skip("nsqtest, where some of the tests are, is a module of its own and is not here: ", err)
	}
	there := map[string]bool{}
	for _, dir := range []string{".", "nsqtest", "nsqtest/e2e", "nsqtest/soak"} {
		files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
		require.NoError(t, err)
		require.NotEmpty(t, files, dir)
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			for _, m := range regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`).FindAllSubmatch(text, -1) {
				there[string(m[1])] = true
			}
		}
	}
	for _, file := range []string{"ARCHITECTURE.md", "FAULTS.md"} {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		names := regexp.MustCompile("`((?:Test|Fuzz|Benchmark)\\w+)").FindAllSubmatch(text, -1)
		require.Greater(t, len(names), 50, file)
		for _, m := range names {
			require.True(t, there[string(m[1])], "%s names %s, which does not exist", file, m[1])
		}
	}
}
