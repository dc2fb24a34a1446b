package nsq

import (
	"cmp"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// README.md has a table of all options. It is compared with the struct tags, which are the only list of them.

func TestReadmeListsEveryOption(t *testing.T) {
	rows := readmeOptions(t)
	var want []string
	for _, o := range options() {
		want = append(want, o.name)
	}
	want = append(want, slices.Sorted(maps.Keys(tlsOptions))...)
	slices.Sort(want)
	require.Equal(t, want, slices.Sorted(maps.Keys(rows)))
}

func TestReadmeOptionsAreWhatTheTagsSay(t *testing.T) {
	rows := readmeOptions(t)
	for _, o := range options() {
		require.Equal(t, readmeRow{
			field: "`" + o.field + "`",
			typ:   readmeType(o.typ),
			def:   readmeDefault(o),
			limit: readmeLimits(o),
		}, rows[o.name], "option %s", o.name)
	}
	for name := range tlsOptions {
		require.Equal(t, "in `TlsConfig`", rows[name].field, "option %s", name)
		require.Equal(t, readmeTLSDefaults[name], rows[name].def, "option %s", name)
	}
}

// readmeRow is one line of the table, but for the meaning.
type readmeRow struct{ field, typ, def, limit string }

// readmeOptions reads the table.
func readmeOptions(t *testing.T) map[string]readmeRow {
	text, err := os.ReadFile("README.md")
	require.NoError(t, err)
	rows := map[string]readmeRow{}
	found := false
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case len(cells) == 8 && cells[1] == "Option":
			found = true
		case !found || len(cells) > 1 && strings.HasPrefix(cells[1], "---"):
		case len(cells) < 2: // the end of the table
			found = false
		default:
			require.Len(t, cells, 8, "%s", line)
			name := strings.Trim(cells[1], "`")
			require.NotContains(t, rows, name, "twice")
			require.NotEmpty(t, cells[6], "meaning of %s", name)
			rows[name] = readmeRow{cells[2], cells[3], cells[4], cells[5]}
		}
	}
	return rows
}

func readmeType(typ reflect.Type) string {
	switch typ.Kind() {
	case reflect.Func:
		return "func"
	default:
		name := typ.String()
		name = strings.TrimPrefix(name, "nsq.")
		return strings.Replace(name, "time.Duration", "Duration", 1)
	}
}

// readmeDefaults are those that no tag can tell.
var readmeDefaults = map[string]string{
	"client_id":  "host name up to its first dot",
	"hostname":   "host name",
	"user_agent": "this library and its version",
}

var readmeTLSDefaults = map[string]string{
	"tls_root_ca_file":         "the system's CAs",
	"tls_cert":                 "none",
	"tls_key":                  "none",
	"tls_insecure_skip_verify": "false",
	"tls_min_version":          "tls1.2",
}

func readmeDefault(o option) string {
	zero := "none" // func, pointer, interface and string
	switch {
	case o.typ.Kind() == reflect.Bool:
		zero = "false"
	case o.isInteger() || o.typ == durationType:
		zero = "0"
	}
	return cmp.Or(readmeDefaults[o.name], o.def, zero)
}

func readmeLimits(o option) string {
	limits := o.min
	if o.min != "" && o.max == "" {
		limits += " or more"
	}
	if o.max != "" {
		limits += "–" + o.max
	}
	if o.off != "" {
		limits = o.off + "; " + limits
	}
	return limits
}
