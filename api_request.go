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
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/bitly/go-simplejson"
)

const (
	// maxLookupAnswer bounds an answer of nsqlookupd. A producer takes about 200 bytes, so that is 20 000 nsqds.
	maxLookupAnswer = 4 << 20

	maxHostName = 253 // bytes, by the rules of DNS

	// lookupdIdle is how long an unused connection to an nsqlookupd is kept. It is shorter than the
	// usual poll interval, so that its name is resolved again and a moved nsqlookupd found.
	lookupdIdle = 10 * time.Second
)

// parseLookupdAddress reads what ConnectToNSQLookupd takes: host:port, which is http://host:port/lookup, or a whole
// http or https URL, whose empty path is completed with /lookup. User, password and query are kept. Errors are
// errMissingPort and *AddressError.
func parseLookupdAddress(addr string) (*url.URL, error) {
	bad := func(reason string) (*url.URL, error) {
		return nil, &AddressError{Address: shownAddress(addr), Reason: reason}
	}
	if reason := unusable(addr); reason != "" {
		return bad(reason)
	}
	if !strings.Contains(addr, "://") {
		if strings.ContainsAny(addr, "/?#@") {
			return bad("neither host:port nor an http or https URL")
		}
		if err := checkHostPort(addr); err != nil {
			if errors.Is(err, errMissingPort) {
				return nil, errMissingPort // go-nsq's text
			}
			return bad(err.Error())
		}
		return &url.URL{Scheme: "http", Host: addr, Path: "/lookup"}, nil
	}

	u, err := url.Parse(addr)
	if err != nil {
		var parse *url.Error
		if errors.As(err, &parse) && !strings.Contains(addr, "@") {
			return bad(parse.Err.Error())
		}
		return bad("not a valid URL") // the reason might quote a password
	}
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		return bad("the scheme must be http or https")
	case u.Host == "":
		return bad("no host")
	}
	if strings.HasSuffix(u.Host, ":") {
		return bad("no port behind the colon")
	}
	host := u.Host
	if u.Port() == "" {
		host += ":80" // the scheme's own; which one makes no difference here
	}
	if err := checkHostPort(host); err != nil {
		return bad(err.Error())
	}
	if _, err := url.ParseQuery(u.RawQuery); err != nil {
		return bad("the query can't be read")
	}
	if u.Path == "" || u.Path == "/" {
		u.Path, u.RawPath = "/lookup", ""
	}
	u.Fragment, u.RawFragment = "", ""
	return u, nil
}

// parseNSQDAddress reads the address of an nsqd: host:port for network tcp, or for network unix the path of a
// socket, which starts with / or ./ or ../ or with unix: in front. Errors are *AddressError.
func parseNSQDAddress(addr string) (network, address string, err error) {
	bad := func(reason string) (string, string, error) {
		return "", "", &AddressError{Address: shownAddress(addr), Reason: reason}
	}
	if reason := unusable(addr); reason != "" {
		return bad(reason)
	}
	path, isUnix := strings.CutPrefix(addr, "unix:")
	if isUnix && strings.HasPrefix(path, "//") {
		path = path[2:] // unix:///run/nsqd.sock
	}
	if isUnix || strings.HasPrefix(addr, "/") || strings.HasPrefix(addr, "./") || strings.HasPrefix(addr, "../") {
		if path == "" {
			return bad("no path")
		}
		return "unix", path, nil
	}
	if strings.Contains(addr, "://") {
		return bad("an nsqd is host:port, without a scheme")
	}
	if err := checkHostPort(addr); err != nil {
		return bad(err.Error())
	}
	return "tcp", addr, nil
}

// unusable names what no address may have in it.
func unusable(addr string) (reason string) {
	if addr == "" {
		return "empty"
	}
	for _, r := range addr {
		switch {
		case unicode.IsSpace(r) && r != '\n' && r != '\r':
			return "has a blank in it"
		case !unicode.IsPrint(r) || r == unicode.ReplacementChar:
			return "has a control character in it"
		}
	}
	return ""
}

// checkHostPort tells what is wrong with a host:port, without repeating any of it: it might be a password in the
// wrong place. An empty host is this machine.
func checkHostPort(addr string) error {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		var ae *net.AddrError
		switch {
		case !errors.As(err, &ae):
			return err
		case ae.Err == "missing port in address":
			return errMissingPort
		}
		return errors.New(ae.Err)
	}
	switch n, err := strconv.ParseUint(port, 10, 16); {
	case port == "":
		return errMissingPort
	case errors.Is(err, strconv.ErrSyntax):
		return errors.New("the port is not a number")
	case err != nil || n == 0:
		return errors.New("the port is not in 1 to 65535")
	}
	if strings.HasPrefix(addr, "[") {
		if !isIPv6(host) {
			return errors.New("what is in brackets is no IPv6 address")
		}
		return nil
	}
	if host != "" && !isHostName(host) {
		return errors.New("not a host name in front of the port")
	}
	return nil
}

func isIPv6(host string) bool {
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Is6() && len(host) <= maxHostName // a zone has no limit of its own
}

// isHostName tells whether host may be a name or an IPv4 address. It is not strict: underscores are in
// use, and so are names in other scripts.
func isHostName(host string) bool {
	if host == "" || len(host) > maxHostName {
		return false
	}
	for _, r := range host {
		switch {
		case r == '-', r == '_', r == '.':
		case unicode.IsLetter(r), unicode.IsDigit(r), unicode.IsMark(r):
		default:
			return false
		}
	}
	return true
}

// lookupAnswer is what one nsqlookupd knows about a topic.
type lookupAnswer struct {
	addrs   []string // host:port of nsqds, each once, in the order of the answer
	skipped int      // producers whose address is no address. An answer with such can't show that an nsqd is gone
	reason  string   // why the first of them was skipped
}

// queryLookupd asks one nsqlookupd where topic is. secret is sent as a bearer token unless it is empty. It blocks until
// ctx ends or the client's timeout has passed. Errors are errTopicNotFound, which is a good answer, and *LookupdError.
func queryLookupd(ctx context.Context, client *http.Client, u *url.URL, topic, secret string) (lookupAnswer, error) {
	failed := func(status int, message string, err error) (lookupAnswer, error) {
		return lookupAnswer{}, &LookupdError{
			Address: lookupdName(u),
			Status:  status,
			Message: printable(cutText(strings.TrimSpace(withoutSecret(message, secret)))),
			Err:     err,
		}
	}

	target := *u
	query := target.Query()
	query.Set("topic", topic)
	target.RawQuery = query.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), nil)
	if err != nil {
		return failed(0, "", withoutURL(err))
	}
	req.Header.Set("Accept", "application/vnd.nsq; version=1.0")
	if secret != "" {
		req.Header.Set("Authorization", "Bearer "+secret)
	}
	resp, err := keepSecretAtHome(client).Do(req)
	if err != nil {
		// Other than HTTP, what nsqd answers to a line it doesn't know.
		if strings.Contains(err.Error(), "malformed HTTP") && strings.Contains(err.Error(), "E_BAD_PROTOCOL") {
			return failed(0, "", ErrNotLookupd)
		}
		return failed(0, "", withoutURL(err))
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxLookupAnswer+1))
	switch {
	case err != nil:
		return failed(resp.StatusCode, "", err)
	case len(body) > maxLookupAnswer:
		return failed(resp.StatusCode, "", fmt.Errorf("the answer is larger than %d bytes", maxLookupAnswer))
	}
	answer, status, message, err := parseLookupAnswer(resp.StatusCode, body)
	switch {
	case err == errTopicNotFound:
		return lookupAnswer{}, err
	case err != nil || message != "" || status != http.StatusOK:
		return failed(status, message, err)
	}
	answer.reason = withoutSecret(answer.reason, secret)
	return answer, nil
}

// parseLookupAnswer reads an answer with its HTTP status. There are two forms, told apart by their shape: the
// document of nsqlookupd 1.x, and the older one that wraps it together with a status. If nsqlookupd refused, status is
// not 200; message is what it said.
func parseLookupAnswer(httpStatus int, body []byte) (answer lookupAnswer, status int, message string, err error) {
	status = httpStatus
	doc, jsonErr := decodeObject(body)
	if jsonErr != nil {
		if status != http.StatusOK {
			return answer, status, string(body), nil // a page of a web server or proxy
		}
		return answer, status, "", jsonErr
	}

	message = doc.Get("message").MustString()
	data := doc
	if _, bare := doc.CheckGet("producers"); !bare {
		if wrapped, ok := doc.CheckGet("data"); ok {
			data = wrapped
			message = doc.Get("status_txt").MustString(message)
			if n, err := doc.Get("status_code").Int64(); err == nil && n > 0 && n < 1000 && status == http.StatusOK {
				status = int(n)
			}
		}
	}
	if status != http.StatusOK {
		if message == "TOPIC_NOT_FOUND" && status == http.StatusNotFound {
			return answer, status, "", errTopicNotFound
		}
		if message == "" {
			message = string(body)
		}
		return answer, status, message, nil
	}

	producers, ok := data.CheckGet("producers")
	if !ok {
		return answer, status, "", errors.New("the answer lists no producers: this is not nsqlookupd's /lookup")
	}
	list, ok := producers.Interface().([]any)
	if !ok && producers.Interface() != nil { // null is an empty list of Go's
		return answer, status, "", errors.New("producers is not a list")
	}
	seen := make(map[string]bool, len(list))
	for i := range list {
		addr, reason := producerAddress(producers.GetIndex(i))
		switch {
		case reason != "":
			if answer.skipped++; answer.skipped == 1 {
				answer.reason = reason
			}
		case !seen[addr]:
			seen[addr] = true
			answer.addrs = append(answer.addrs, addr)
		}
	}
	return answer, status, "", nil
}

// decodeObject reads body as a single JSON object.
func decodeObject(body []byte) (*simplejson.Json, error) {
	if len(bytes.TrimSpace(body)) == 0 {
		return nil, errors.New("the answer is empty")
	}
	if !json.Valid(body) { // simplejson would take what stands behind the first value for nothing
		return nil, errors.New("the answer is not JSON")
	}
	doc, err := simplejson.NewJson(body)
	if err != nil {
		return nil, fmt.Errorf("the answer can't be read: %w", err)
	}
	if _, err := doc.Map(); err != nil {
		return nil, errors.New("the answer is not a JSON object")
	}
	return doc, nil
}

// producerAddress is the address to dial for one producer, or why there is none.
func producerAddress(p *simplejson.Json) (addr, reason string) {
	host, err := p.Get("broadcast_address").String()
	if err != nil || host == "" {
		return "", "a producer without broadcast_address"
	}
	if strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]") {
		host = host[1 : len(host)-1]
	}
	// Not what Int64 gives for a string, a bool or a null.
	number, _ := p.Get("tcp_port").Interface().(json.Number)
	port, err := strconv.ParseUint(number.String(), 10, 16)
	if err != nil || port == 0 {
		return "", fmt.Sprintf("producer %s without a valid tcp_port", printable(cutText(host)))
	}
	if !isIPv6(host) && !isHostName(host) {
		return "", fmt.Sprintf("%q is no host name", cutText(host))
	}
	addr = net.JoinHostPort(host, strconv.FormatUint(port, 10))
	if _, _, err := parseNSQDAddress(addr); err != nil {
		return "", strings.TrimPrefix(err.Error(), "nsq: ")
	}
	return addr, ""
}

// withoutURL takes off the URL that package net/http puts in front, with its user name.
func withoutURL(err error) error {
	var ue *url.Error
	if errors.As(err, &ue) {
		return ue.Err
	}
	return err
}

// keepSecretAtHome returns a client that drops the bearer token when it is sent elsewhere, and the URL it came from,
// which may have a token in it. Package net/http alone still sends them to other ports and subdomains, the bearer token
// also from https to http.
func keepSecretAtHome(client *http.Client) *http.Client {
	c := *client
	c.CheckRedirect = func(req *http.Request, via []*http.Request) error {
		if from := via[0].URL; req.URL.Scheme != from.Scheme || req.URL.Host != from.Host {
			req.Header.Del("Authorization")
			req.Header.Del("Referer")
		}
		switch {
		case client.CheckRedirect != nil:
			return client.CheckRedirect(req, via)
		case len(via) >= 10:
			return errors.New("more than 10 redirects")
		}
		return nil
	}
	return &c
}

// newLookupdClient returns the HTTP client that a consumer shares over its nsqlookupds, with timeout for each step
// and for the whole; 0 is none. It goes through no proxy, whatever the environment says: nsqlookupds are near, and a
// proxy would be told AuthSecret. Its connections are closed by CloseIdleConnections, or after some idle seconds by themselves.
func newLookupdClient(timeout time.Duration) *http.Client {
	timeout = max(timeout, 0)
	return &http.Client{
		Timeout: timeout,
		Transport: &http.Transport{
			DialContext:            (&net.Dialer{Timeout: timeout}).DialContext,
			TLSHandshakeTimeout:    timeout,
			ResponseHeaderTimeout:  timeout,
			IdleConnTimeout:        lookupdIdle,
			MaxIdleConns:           16,
			MaxIdleConnsPerHost:    1,
			MaxResponseHeaderBytes: 64 << 10,
		},
	}
}
