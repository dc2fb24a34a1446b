package nsq

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestParseLookupdAddress(t *testing.T) {
	long := strings.Repeat("a", 254)
	tests := map[string]struct {
		addr string
		want string
		err  string // part of the text
	}{
		"host and port":           {addr: "lookupd:4161", want: "http://lookupd:4161/lookup"},
		"IPv4":                    {addr: "127.0.0.1:4161", want: "http://127.0.0.1:4161/lookup"},
		"IPv6":                    {addr: "[::1]:4161", want: "http://[::1]:4161/lookup"},
		"this machine":            {addr: ":4161", want: "http://:4161/lookup"},
		"underscore":              {addr: "my_lookupd.x-y:1", want: "http://my_lookupd.x-y:1/lookup"},
		"another script":          {addr: "bücher:4161", want: "http://b%C3%BCcher:4161/lookup"},
		"URL":                     {addr: "http://lookupd:4161", want: "http://lookupd:4161/lookup"},
		"URL with /":              {addr: "http://lookupd:4161/", want: "http://lookupd:4161/lookup"},
		"URL with a path":         {addr: "http://lookupd:4161/nsq/lookup", want: "http://lookupd:4161/nsq/lookup"},
		"URL with another path":   {addr: "http://lookupd:4161/x/", want: "http://lookupd:4161/x/"},
		"URL with a query":        {addr: "http://lookupd:4161?dc=a&b", want: "http://lookupd:4161/lookup?dc=a&b"},
		"URL without a port":      {addr: "https://lookupd", want: "https://lookupd/lookup"},
		"URL in capitals":         {addr: "HTTPS://lookupd:443/Lookup", want: "https://lookupd:443/Lookup"},
		"URL of IPv6":             {addr: "http://[::1]:4161/lookup", want: "http://[::1]:4161/lookup"},
		"URL of IPv6, no port":    {addr: "http://[::1]", want: "http://[::1]/lookup"},
		"user and password":       {addr: "http://u:p@lookupd:4161", want: "http://u:p@lookupd:4161/lookup"},
		"fragment":                {addr: "http://lookupd:4161/#x", want: "http://lookupd:4161/lookup"},
		"empty":                   {addr: "", err: "empty"},
		"blank in front":          {addr: " host:4161", err: "blank"},
		"blank behind":            {addr: "host:4161 ", err: "blank"},
		"blank in a URL":          {addr: "http://host:4161/a b", err: "blank"},
		"tab":                     {addr: "host:\t4161", err: "blank"},
		"line end":                {addr: "host:4161\n", err: "control"},
		"NUL":                     {addr: "host\x00:4161", err: "control"},
		"no UTF-8":                {addr: "\xff:4161", err: "control"},
		"no port":                 {addr: "host", err: "missing port"},
		"empty port":              {addr: "host:", err: "missing port"},
		"word as port":            {addr: "host:abc", err: "port is not a number"},
		"signed port":             {addr: "host:+1", err: "port is not a number"},
		"port 0":                  {addr: "host:0", err: "1 to 65535"},
		"port too large":          {addr: "host:65536", err: "1 to 65535"},
		"port far too large":      {addr: "host:99999999999999999999", err: "1 to 65535"},
		"IPv6 without brackets":   {addr: "::1", err: "colons"},
		"IPv6 with wrong bracket": {addr: "[::1:4161", err: "']'"},
		"name in brackets":        {addr: "[host]:4161", err: "brackets"},
		"host with a slash":       {addr: "host:4161/lookup", err: "neither"},
		"user without scheme":     {addr: "u:secret@host:4161", err: "neither"},
		"name too long":           {addr: long + ":4161", err: "host name"},
		"only a scheme":           {addr: "http://", err: "no host"},
		"scheme and path":         {addr: "http:///lookup", err: "no host"},
		"scheme and port":         {addr: "http://:", err: "no port"},
		"URL with empty port":     {addr: "http://host:", err: "no port"},
		"URL with word as port":   {addr: "http://host:abc", err: "invalid port"},
		"URL with port 0":         {addr: "http://host:0/", err: "1 to 65535"},
		"URL with large port":     {addr: "http://host:70000/", err: "1 to 65535"},
		"URL with bad host":       {addr: "http://a,b:4161/", err: "host name"},
		"URL with bad query":      {addr: "http://host:4161/?a;b", err: "query"},
		"URL with bad escape":     {addr: "http://host:4161/%zz", err: "escape"},
		"scheme of nsqd":          {addr: "tcp://host:4161", err: "scheme"},
		"no scheme":               {addr: "://host:4161", err: "scheme"},
		"bad URL with a password": {addr: "http://u:secret@host:abc", err: "not a valid URL"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			u, err := parseLookupdAddress(tt.addr)
			if tt.err == "" {
				require.NoError(t, err)
				require.Equal(t, tt.want, u.String())
				return
			}
			require.Nil(t, u)
			require.ErrorContains(t, err, tt.err)
			require.NotContains(t, err.Error(), "secret")
			if err == errMissingPort {
				return // exactly go-nsq's
			}
			var ae *AddressError
			require.ErrorAs(t, err, &ae)
			if !strings.Contains(tt.addr, "@") {
				require.Equal(t, tt.addr, ae.Address)
			}
			require.NotContains(t, err.Error(), "\n")
		})
	}
}

func TestParseNSQDAddress(t *testing.T) {
	tests := map[string]struct {
		addr, network, want string
		err                 string
	}{
		"host and port":         {addr: "nsqd:4150", network: "tcp", want: "nsqd:4150"},
		"IPv4":                  {addr: "10.0.0.1:4150", network: "tcp", want: "10.0.0.1:4150"},
		"IPv6":                  {addr: "[::1]:4150", network: "tcp", want: "[::1]:4150"},
		"IPv6 with a zone":      {addr: "[fe80::1%eth0]:4150", network: "tcp", want: "[fe80::1%eth0]:4150"},
		"this machine":          {addr: ":4150", network: "tcp", want: ":4150"},
		"path":                  {addr: "/run/nsqd.sock", network: "unix", want: "/run/nsqd.sock"},
		"relative path":         {addr: "./nsqd.sock", network: "unix", want: "./nsqd.sock"},
		"path above":            {addr: "../nsqd.sock", network: "unix", want: "../nsqd.sock"},
		"unix":                  {addr: "unix:/run/nsqd.sock", network: "unix", want: "/run/nsqd.sock"},
		"unix, relative":        {addr: "unix:nsqd.sock", network: "unix", want: "nsqd.sock"},
		"unix URL":              {addr: "unix:///run/nsqd.sock", network: "unix", want: "/run/nsqd.sock"},
		"unix alone":            {addr: "unix:", err: "no path"},
		"unix and slashes":      {addr: "unix://", err: "no path"},
		"path with a blank":     {addr: "/run/nsqd.sock ", err: "blank"},
		"path with a NUL":       {addr: "/run/\x00", err: "control"},
		"empty":                 {addr: "", err: "empty"},
		"blank":                 {addr: " nsqd:4150", err: "blank"},
		"line end":              {addr: "nsqd:4150\r\n", err: "control"},
		"no port":               {addr: "nsqd", err: "missing port"},
		"empty port":            {addr: "nsqd:", err: "missing port"},
		"word as port":          {addr: "nsqd:nsq", err: "not a number"},
		"port 0":                {addr: "nsqd:0", err: "1 to 65535"},
		"port too large":        {addr: "nsqd:65536", err: "1 to 65535"},
		"URL":                   {addr: "http://nsqd:4150", err: "without a scheme"},
		"TCP URL":               {addr: "tcp://nsqd:4150", err: "without a scheme"},
		"IPv6 without brackets": {addr: "::1:4150", err: "colons"},
		"two ports":             {addr: "nsqd:4150:4150", err: "colons"},
		"no IPv6 in brackets":   {addr: "[127.0.0.1]:4150", err: "brackets"},
		"bad name":              {addr: "nsqd,nsqd2:4150", err: "host name"},
		"path behind the port":  {addr: "nsqd:4150/x", err: "not a number"},
		"user":                  {addr: "secret@nsqd:4150", err: "host name"},
		"password as port":      {addr: "u:secret@nsqd", err: "not a number"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			network, addr, err := parseNSQDAddress(tt.addr)
			if tt.err == "" {
				require.NoError(t, err)
				require.Equal(t, []string{tt.network, tt.want}, []string{network, addr})
				return
			}
			var ae *AddressError
			require.ErrorAs(t, err, &ae)
			require.ErrorContains(t, err, tt.err)
			require.NotContains(t, err.Error(), "secret")
			require.Empty(t, network+addr)
		})
	}
}

// lookupdStub starts a web server and returns its address as a nsqlookupd.
func lookupdStub(t *testing.T, h http.HandlerFunc) *url.URL {
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	u, err := parseLookupdAddress(s.Listener.Addr().String())
	require.NoError(t, err)
	return u
}

func testLookupdClient(t *testing.T) *http.Client {
	c := newLookupdClient(10 * time.Second)
	t.Cleanup(c.CloseIdleConnections)
	return c
}

func TestQueryLookupdRequest(t *testing.T) {
	var got *http.Request
	u := lookupdStub(t, func(w http.ResponseWriter, r *http.Request) {
		got = r
		io.WriteString(w, `{"producers":[]}`)
	})
	client := testLookupdClient(t)
	ask := func(addr, secret string) *http.Request {
		u, err := parseLookupdAddress(addr)
		require.NoError(t, err)
		before := u.String()
		_, err = queryLookupd(t.Context(), client, u, "a.b#ephemeral", secret)
		require.NoError(t, err)
		require.Equal(t, before, u.String(), "the URL is the caller's")
		return got
	}

	r := ask(u.Host, "")
	require.Equal(t, "GET /lookup?topic=a.b%23ephemeral", r.Method+" "+r.RequestURI)
	require.Equal(t, []string{"application/vnd.nsq; version=1.0"}, r.Header["Accept"])
	require.NotContains(t, r.Header, "Authorization")

	r = ask("http://"+u.Host+"/x/lookup?dc=b&a=1&topic=other", "s3cret")
	require.Equal(t, "/x/lookup?a=1&dc=b&topic=a.b%23ephemeral", r.RequestURI)
	require.Equal(t, []string{"Bearer s3cret"}, r.Header["Authorization"])

	r = ask("http://u:p@"+u.Host, "")
	user, password, _ := r.BasicAuth()
	require.Equal(t, "u p", user+" "+password)
	r = ask("http://u:p@"+u.Host, "s3cret")
	require.Equal(t, []string{"Bearer s3cret"}, r.Header["Authorization"])
}

func producerJSON(host string, port any) string {
	name, _ := json.Marshal(host)
	return fmt.Sprintf(`{"remote_address":"9.9.9.9:51234","hostname":"wrong","broadcast_address":%s,"tcp_port":%v,"http_port":4151,"version":"1.3.0"}`, name, port)
}

func TestQueryLookupdAnswers(t *testing.T) {
	t.Parallel()
	bare := func(producers ...string) string {
		return `{"channels":["c"],"producers":[` + strings.Join(producers, ",") + `]}`
	}
	wrapped := func(doc string) string { return `{"status_code":200,"status_txt":"OK","data":` + doc + `}` }
	tests := map[string]struct {
		status  int // 200 unless set
		body    string
		addrs   []string
		skipped int
		reason  string
		err     string // in the text of a *LookupdError
		in      int    // its Status, if not that of HTTP
	}{
		"a producer":                 {body: bare(producerJSON("h.example", 4150)), addrs: []string{"h.example:4150"}},
		"wrapped":                    {body: wrapped(bare(producerJSON("h.example", 4150))), addrs: []string{"h.example:4150"}},
		"wrapped without a status":   {body: `{"data":` + bare(producerJSON("h.example", 4150)) + `}`, addrs: []string{"h.example:4150"}},
		"none":                       {body: bare()},
		"none, wrapped":              {body: wrapped(bare())},
		"null":                       {body: `{"channels":null,"producers":null}`},
		"white space around":         {body: " \n" + bare(producerJSON("h", 1)) + "\n", addrs: []string{"h:1"}},
		"IPv6":                       {body: bare(producerJSON("::1", 4150), producerJSON("[fe80::2]", 4150)), addrs: []string{"[::1]:4150", "[fe80::2]:4150"}},
		"order and doubles":          {body: bare(producerJSON("b", 2), producerJSON("a", 1), producerJSON("b", 2), producerJSON("b", 3), producerJSON("[::1]", 1), producerJSON("::1", 1)), addrs: []string{"b:2", "a:1", "b:3", "[::1]:1"}},
		"unknown fields":             {body: `{"x":{"y":[1.5e300]},"producers":[{"broadcast_address":"h","tcp_port":1,"topology_zone":"z"}]}`, addrs: []string{"h:1"}},
		"port 0":                     {body: bare(producerJSON("h", 0), producerJSON("g", 1)), addrs: []string{"g:1"}, skipped: 1, reason: "producer h without a valid tcp_port"},
		"ports that are none":        {body: bare(producerJSON("h", 65536), producerJSON("h", -1), producerJSON("h", 1.5), producerJSON("h", "1e3"), producerJSON("h", `"4150"`), producerJSON("h", "null"), producerJSON("h", "true"), producerJSON("h", "99999999999999999999999")), skipped: 8, reason: "producer h"},
		"no port":                    {body: bare(`{"broadcast_address":"h"}`), skipped: 1, reason: "tcp_port"},
		"no broadcast_address":       {body: bare(`{"tcp_port":1}`, producerJSON("", 1), `{"broadcast_address":7,"tcp_port":1}`, `{"broadcast_address":null,"tcp_port":1}`, producerJSON("h", 1)), addrs: []string{"h:1"}, skipped: 4, reason: "without broadcast_address"},
		"hosts that are none":        {body: bare(producerJSON("a b", 1), producerJSON("a\nb", 1), producerJSON("a\u0000", 1), producerJSON("h:1", 1), producerJSON("http://h", 1), producerJSON("/run/x.sock", 1), producerJSON("unix:x", 1), producerJSON("[]", 1), producerJSON("[h", 1), producerJSON("u@h", 1), producerJSON("fe80::1%]:1", 1), producerJSON(strings.Repeat("h", 300), 1), producerJSON("fe80::1%"+strings.Repeat("z", 300), 1)), skipped: 13, reason: `"a b" is no host name`},
		"producers that are none":    {body: bare(`null`, `"h:1"`, `7`, `[]`, producerJSON("h", 1)), addrs: []string{"h:1"}, skipped: 4, reason: "without broadcast_address"},
		"empty":                      {body: "", err: "empty"},
		"blank":                      {body: " \n", err: "empty"},
		"garbage":                    {body: "<html>hello</html>", err: "not JSON"},
		"cut":                        {body: bare(producerJSON("h", 1))[:40], err: "not JSON"},
		"something behind":           {body: bare() + "x", err: "not JSON"},
		"two documents":              {body: bare() + bare(), err: "not JSON"},
		"nested too deep":            {body: strings.Repeat("[", 20000), err: "not JSON"},
		"a list":                     {body: "[]", err: "not a JSON object"},
		"null document":              {body: "null", err: "not a JSON object"},
		"a string":                   {body: `"OK"`, err: "not a JSON object"},
		"another document":           {body: `{"version":"1.3.0"}`, err: "no producers"},
		"wrapped null":               {body: wrapped("null"), err: "no producers"},
		"wrapped list":               {body: wrapped("[]"), err: "no producers"},
		"producers are an object":    {body: `{"producers":{}}`, err: "not a list"},
		"producers are a string":     {body: wrapped(`{"producers":"h:1"}`), err: "not a list"},
		"too large":                  {body: strings.Repeat(" ", maxLookupAnswer) + bare(), err: "larger than"},
		"refused":                    {status: 400, body: `{"message":"MISSING_ARG_TOPIC"}`, err: "status 400: MISSING_ARG_TOPIC"},
		"refused, wrapped":           {status: 500, body: `{"status_code":500,"status_txt":"INTERNAL_ERROR","data":null}`, err: "status 500: INTERNAL_ERROR"},
		"refused in a good answer":   {body: `{"status_code":503,"status_txt":"NOT_READY","data":null}`, err: "status 503: NOT_READY", in: 503},
		"an error with producers":    {status: 500, body: bare(producerJSON("h", 1)), err: "status 500"},
		"web server's 404":           {status: 404, body: "404 page not found\n", err: "status 404: 404 page not found"},
		"nsqd's 404":                 {status: 404, body: `{"message":"NOT_FOUND"}`, err: "status 404: NOT_FOUND"},
		"not found in another place": {status: 404, body: `{"producers":"TOPIC_NOT_FOUND"}`, err: "status 404"},
		"not found with 500":         {status: 500, body: `{"message":"TOPIC_NOT_FOUND"}`, err: "status 500"},
		"not found with 200":         {body: `{"message":"TOPIC_NOT_FOUND"}`, err: "no producers"},
		"404 without a text":         {status: 404, body: "", err: "status 404"},
		"a page with line ends":      {status: 502, body: "<html>\r\nERR  1 [t/c] forged", err: `status 502: <html>\r\nERR  1 [t/c] forged`},
		"secret sent back":           {status: 401, body: `{"message":"s3cret is not known"}`, err: "status 401: xxxxx is not known"},
		"no content":                 {status: 204, body: "", err: "status 204"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if tt.status == 0 {
				tt.status = 200
			}
			u := lookupdStub(t, func(w http.ResponseWriter, r *http.Request) {
				w.WriteHeader(tt.status)
				io.WriteString(w, tt.body)
			})
			answer, err := queryLookupd(t.Context(), testLookupdClient(t), u, "topic", "s3cret")
			if tt.err != "" {
				var le *LookupdError
				require.ErrorAs(t, err, &le)
				require.ErrorContains(t, err, tt.err)
				require.NotErrorIs(t, err, errTopicNotFound)
				require.Equal(t, u.String(), le.Address)
				if tt.in == 0 {
					tt.in = tt.status
				}
				require.Equal(t, tt.in, le.Status)
				require.Zero(t, answer)
				require.NotContains(t, err.Error(), "s3cret")
				require.Less(t, len(err.Error()), 1000)
				return
			}
			require.NoError(t, err)
			require.Equal(t, tt.addrs, answer.addrs)
			require.Equal(t, tt.skipped, answer.skipped)
			require.Contains(t, answer.reason, tt.reason)
			require.Equal(t, tt.skipped > 0, answer.reason != "")
		})
	}
}

func TestQueryLookupdTopicNotFound(t *testing.T) {
	for name, tt := range map[string]struct {
		status int
		body   string
	}{
		"1.x":                       {404, `{"message":"TOPIC_NOT_FOUND"}`},
		"wrapped":                   {404, `{"status_code":404,"status_txt":"TOPIC_NOT_FOUND","data":null}`},
		"wrapped, in a good answer": {200, `{"status_code":404,"status_txt":"TOPIC_NOT_FOUND","data":null}`},
	} {
		u := lookupdStub(t, func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(tt.status)
			io.WriteString(w, tt.body)
		})
		_, err := queryLookupd(t.Context(), testLookupdClient(t), u, "topic", "")
		require.ErrorIs(t, err, errTopicNotFound, name)
	}
}

func TestQueryLookupdBodyBreaksOff(t *testing.T) {
	u := lookupdStub(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "1000")
		io.WriteString(w, `{"producers":[]}`)
	})
	_, err := queryLookupd(t.Context(), testLookupdClient(t), u, "topic", "")
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

// A server that never comes to an end is left after 4 MiB.
func TestQueryLookupdEndlessBody(t *testing.T) {
	t.Parallel()
	u := lookupdStub(t, func(w http.ResponseWriter, r *http.Request) {
		chunk := bytes.Repeat([]byte("x"), 1<<20)
		for {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	})
	_, err := queryLookupd(t.Context(), testLookupdClient(t), u, "topic", "")
	require.ErrorContains(t, err, "larger than 4194304 bytes")
}

func TestQueryLookupdEnds(t *testing.T) {
	arrived := make(chan struct{}, 10)
	u := lookupdStub(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slowbody" {
			w.(http.Flusher).Flush()
		}
		arrived <- struct{}{}
		<-r.Context().Done()
	})
	slowBody := *u
	slowBody.Path = "/slowbody"
	for _, u := range []*url.URL{u, &slowBody} {
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			<-arrived
			cancel()
		}()
		_, err := queryLookupd(ctx, testLookupdClient(t), u, "topic", "")
		require.ErrorIs(t, err, context.Canceled)

		client := newLookupdClient(30 * time.Millisecond)
		_, err = queryLookupd(t.Context(), client, u, "topic", "")
		client.CloseIdleConnections()
		var le *LookupdError
		require.ErrorAs(t, err, &le)
		var ne net.Error
		require.ErrorAs(t, err, &ne)
		require.True(t, ne.Timeout())
	}
}

// rawServer answers each connection with the same bytes, once something has come.
func rawServer(t *testing.T, answer string) *url.URL {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				c.Read(make([]byte, 64<<10)) // all of it, or the close would be a reset
				io.WriteString(c, answer)
			}()
		}
	}()
	u, err := parseLookupdAddress(l.Addr().String())
	require.NoError(t, err)
	return u
}

func TestQueryLookupdAtOtherServers(t *testing.T) {
	badProtocol := string(appendFrame(nil, FrameTypeError, []byte("E_BAD_PROTOCOL")))
	_, err := queryLookupd(t.Context(), testLookupdClient(t), rawServer(t, badProtocol), "topic", "")
	require.ErrorIs(t, err, ErrNotLookupd)
	require.ErrorContains(t, err, "looks like an nsqd TCP port")

	// nsqlookupd's own TCP port has no frame types.
	_, err = queryLookupd(t.Context(), testLookupdClient(t), rawServer(t, sized(14, "E_BAD_PROTOCOL")), "topic", "")
	require.ErrorIs(t, err, ErrNotLookupd)

	for _, answer := range []string{"", "SSH-2.0-OpenSSH_9.6\r\n", strings.Repeat("x", 200<<10), "HTTP/1.1 200 OK\r\n" + strings.Repeat("X: y\r\n", 30<<10)} {
		_, err = queryLookupd(t.Context(), testLookupdClient(t), rawServer(t, answer), "topic", "")
		var le *LookupdError
		require.ErrorAs(t, err, &le)
		require.NotErrorIs(t, err, ErrNotLookupd)
		require.Zero(t, le.Status)
		require.Less(t, len(err.Error()), 1000)
	}
}

func TestQueryLookupdKeepsSecrets(t *testing.T) {
	closed := rawServer(t, "")
	closed.User = url.UserPassword("us3r", "p4ssword")
	_, err := queryLookupd(t.Context(), testLookupdClient(t), closed, "topic", "s3cret")
	require.Error(t, err)
	for _, secret := range []string{"us3r", "p4ssword", "s3cret"} {
		require.NotContains(t, err.Error(), secret)
		require.NotContains(t, fmt.Sprintf("%+v", err), secret)
	}
	require.ErrorContains(t, err, "http://xxxxx@"+closed.Host+"/lookup")
	require.Equal(t, "http://xxxxx@"+closed.Host+"/lookup", lookupdName(closed))

	_, err = queryLookupd(t.Context(), testLookupdClient(t), closed, "topic", "s3cret\r\nX: y")
	require.Error(t, err)
	require.NotContains(t, err.Error(), "s3cret")
}

func TestQueryLookupdRedirects(t *testing.T) {
	var seen []string
	answer := func(w http.ResponseWriter, r *http.Request) {
		seen = append(seen, r.URL.Path+" "+r.Header.Get("Authorization"))
		assert.Equal(t, "application/vnd.nsq; version=1.0", r.Header.Get("Accept"))
		io.WriteString(w, `{"producers":[]}`)
	}
	other := lookupdStub(t, answer)
	mux := http.NewServeMux()
	u := lookupdStub(t, mux.ServeHTTP)
	mux.HandleFunc("/good", answer)
	for from, to := range map[string]string{
		"/same":    "/good",
		"/other":   "http://" + other.Host + "/x",
		"/through": "/other",
		"/loop":    "/loop",
	} {
		mux.Handle(from, http.RedirectHandler(to, http.StatusFound))
	}
	ask := func(client *http.Client, path string) ([]string, error) {
		seen = nil
		u.Path = path
		_, err := queryLookupd(t.Context(), client, u, "topic", "s3cret")
		return seen, err
	}
	client := testLookupdClient(t)
	for path, want := range map[string]string{"/same": "/good Bearer s3cret", "/other": "/x ", "/through": "/x "} {
		got, err := ask(client, path)
		require.NoError(t, err, path)
		require.Equal(t, []string{want}, got, path)
	}
	_, err := ask(client, "/loop")
	require.ErrorContains(t, err, "redirects")
	require.Nil(t, client.CheckRedirect, "the client is the caller's")

	// A client of the user's keeps its own rule.
	refuse := errors.New("refused")
	own := &http.Client{Transport: client.Transport, CheckRedirect: func(req *http.Request, via []*http.Request) error {
		require.Empty(t, req.Header.Get("Authorization"))
		return refuse
	}}
	_, err = ask(own, "/other")
	require.ErrorIs(t, err, refuse)
	own.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	_, err = ask(own, "/other")
	require.ErrorContains(t, err, "status 302")
}

func TestLookupdClient(t *testing.T) {
	c := newLookupdClient(3 * time.Second)
	require.Equal(t, 3*time.Second, c.Timeout)
	tr := c.Transport.(*http.Transport)
	require.Equal(t, 3*time.Second, tr.ResponseHeaderTimeout)
	require.Equal(t, 3*time.Second, tr.TLSHandshakeTimeout)
	require.Less(t, tr.IdleConnTimeout, time.Minute)
	require.Nil(t, tr.Proxy, "a proxy of the environment would be told the secret")
	require.Nil(t, tr.TLSClientConfig)
	require.NotSame(t, http.DefaultTransport, tr)
	require.Zero(t, newLookupdClient(-1).Timeout)
}

// Queries one after another use one connection.
func TestLookupdClientKeepsConnection(t *testing.T) {
	remotes := map[string]bool{}
	u := lookupdStub(t, func(w http.ResponseWriter, r *http.Request) {
		remotes[r.RemoteAddr] = true
		w.WriteHeader(404)
		io.WriteString(w, `{"message":"TOPIC_NOT_FOUND"}`)
	})
	client := testLookupdClient(t)
	for range 5 {
		_, err := queryLookupd(t.Context(), client, u, "topic", "")
		require.ErrorIs(t, err, errTopicNotFound)
	}
	require.Len(t, remotes, 1)
}

func FuzzParseLookupAnswer(f *testing.F) {
	f.Add(200, []byte(`{"channels":["c"],"producers":[`+producerJSON("::1", 4150)+","+producerJSON("h", 1)+`]}`))
	f.Add(200, []byte(`{"status_code":200,"status_txt":"OK","data":{"producers":[`+producerJSON("a b", 4150)+`]}}`))
	f.Add(404, []byte(`{"message":"TOPIC_NOT_FOUND"}`))
	f.Add(200, []byte(`{"status_code":404,"status_txt":"TOPIC_NOT_FOUND","data":null}`))
	f.Add(200, []byte(`{"producers":null}`))
	f.Add(200, []byte(`{"producers":[null,7,{"broadcast_address":"[fe80::1%a]","tcp_port":"1"},{"broadcast_address":"\u0000","tcp_port":1e3}]}`))
	f.Fuzz(func(t *testing.T, httpStatus int, body []byte) {
		answer, status, message, err := parseLookupAnswer(httpStatus, body)
		if err != nil || status != http.StatusOK {
			require.Zero(t, answer)
		}
		if err != nil && err != errTopicNotFound {
			require.Equal(t, err.Error(), printable(err.Error()))
			require.Less(t, len(err.Error()), 1000)
		}

		// Both forms say the same. Which one an answer has is told by its shape, so only a bare one can be wrapped.
		var doc struct {
			Producers *[]json.RawMessage `json:"producers"`
		}
		if bare := json.Unmarshal(body, &doc) == nil && doc.Producers != nil; bare && status == http.StatusOK && err == nil {
			require.LessOrEqual(t, len(answer.addrs)+answer.skipped, len(*doc.Producers))
			wrapped := slices.Concat([]byte(`{"status_code":200,"status_txt":"OK","data":`), body, []byte("}"))
			wrappedAnswer, wrappedStatus, wrappedMessage, wrappedErr := parseLookupAnswer(httpStatus, wrapped)
			require.Equal(t, []any{answer, status, message, err}, []any{wrappedAnswer, wrappedStatus, wrappedMessage, wrappedErr})
		}
		if len(answer.addrs) > 0 { // what was understood, said again
			var producers []string
			for _, addr := range answer.addrs {
				host, port, err := net.SplitHostPort(addr)
				require.NoError(t, err)
				n, err := strconv.Atoi(port)
				require.NoError(t, err)
				producers = append(producers, producerJSON(host, n))
			}
			again, _, _, err := parseLookupAnswer(200, []byte(`{"producers":[`+strings.Join(producers, ",")+`]}`))
			require.NoError(t, err)
			require.Equal(t, lookupAnswer{addrs: answer.addrs}, again)
		}
		seen := map[string]bool{}
		for _, addr := range answer.addrs {
			network, same, err := parseNSQDAddress(addr)
			require.NoError(t, err)
			require.Equal(t, "tcp", network)
			require.Equal(t, addr, same)
			require.Equal(t, addr, printable(addr))
			require.False(t, seen[addr])
			seen[addr] = true
		}
		require.Equal(t, answer.reason, printable(answer.reason))
	})
}

func FuzzParseAddresses(f *testing.F) {
	for _, s := range []string{"", "host:4161", "[::1]:4161", "http://h:1/x?y=z", "http://u:p@h", "unix:/x", "/x", " h:1", "h:abc", "://", "http://[::1%25eth0]:80"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if network, addr, err := parseNSQDAddress(s); err == nil {
			require.Contains(t, []string{"tcp", "unix"}, network)
			require.NotEmpty(t, addr)
			require.Equal(t, s, printable(s))
			switch network {
			case "tcp": // dialled as it is
				require.Equal(t, s, addr)
				host, port, err := net.SplitHostPort(addr)
				require.NoError(t, err)
				n, err := net.LookupPort("tcp", port)
				require.NoError(t, err)
				require.Equal(t, strconv.Itoa(n), strings.TrimLeft(port, "0"), "the port that is meant, which is no service's name and not 0")
				require.NotContains(t, host, "/")
				require.Equal(t, strings.TrimSuffix(host, "."), hostOf(s), "the name that TLS verifies")
			case "unix":
				require.True(t, strings.HasSuffix(s, addr))
			}
		} else {
			require.Equal(t, err.Error(), printable(err.Error()))
		}
		u, err := parseLookupdAddress(s)
		if err != nil {
			require.Equal(t, err.Error(), printable(err.Error()))
			return
		}
		again, err := parseLookupdAddress(u.String())
		require.NoError(t, err, "what was read can be read again: %s", u)
		require.Equal(t, u.String(), again.String())
		_, err = http.NewRequest(http.MethodGet, u.String(), nil)
		require.NoError(t, err)
		require.NotEmpty(t, u.Host)
		require.NotEmpty(t, u.Path)
		require.Contains(t, []string{"http", "https"}, u.Scheme)
		require.Empty(t, u.Fragment)
		if !strings.Contains(s, "://") {
			require.Equal(t, []string{"http", s, "/lookup"}, []string{u.Scheme, u.Host, u.Path})
			network, addr, err := parseNSQDAddress(s)
			require.Equal(t, []any{"tcp", s, nil}, []any{network, addr, err}, "what is host:port here is host:port there")
		} else {
			require.Equal(t, strings.ToLower(s[:strings.Index(s, "://")]), u.Scheme)
			require.Contains(t, s, u.RawQuery)
		}
		if password, ok := u.User.Password(); ok && len(password) > 5 && !strings.Contains(u.Redacted(), password) {
			require.NotContains(t, lookupdName(u), password)
		}
	})
}
